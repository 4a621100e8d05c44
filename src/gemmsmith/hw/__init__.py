"""PTX instructions, one module per family.

Each class defines operands, PTX and simulated semantics; the functions here record one instruction. The other names are
what an `Instruction` of your own needs.
"""

from gemmsmith.hw import (
    arithmetic,
    barrier,
    cluster,
    convert,
    cp_async,
    matrix,
    mbarrier,
    memory,
    mma,
    register,
    tma,
    wgmma,
    wmma,
)
from gemmsmith.hw.convert import round_pair as round_pair
from gemmsmith.hw.convert import unpack_pair as unpack_pair
from gemmsmith.hw.convert import unpack_ue8m0 as unpack_ue8m0
from gemmsmith.hw.register import opaque as opaque
from gemmsmith.hw.register import set_registers as set_registers
from gemmsmith.hw.register import sum_of_lanes_before as sum_of_lanes_before
from gemmsmith.hw.wgmma import descriptor as descriptor
from gemmsmith.lang import location
from gemmsmith.lang.current_builder import current_builder as _current_builder
from gemmsmith.lang.instruction import Instruction as Instruction
from gemmsmith.lang.instruction import emitter as emitter
from gemmsmith.lang.instruction import f32 as f32
from gemmsmith.lang.instruction import i32 as i32
from gemmsmith.lang.instruction import i64 as i64
from gemmsmith.lang.instruction import pred as pred
from gemmsmith.lang.instruction import registers_in as registers_in
from gemmsmith.lang.instruction import registers_inout as registers_inout
from gemmsmith.lang.instruction import registers_out as registers_out
from gemmsmith.lang.instruction import u16 as u16
from gemmsmith.lang.instruction import u32 as u32
from gemmsmith.lang.instruction import u64 as u64
from gemmsmith.machine import Machine as Machine

location.hide_frames(__file__)

mbarrier_init = emitter(mbarrier.MbarrierInit)
fence_mbarrier_init = emitter(mbarrier.FenceMbarrierInit)
mbarrier_arrive = emitter(mbarrier.MbarrierArrive)
mbarrier_arrive_remote = emitter(mbarrier.MbarrierArriveRemote)
mbarrier_arrive_expect_tx = emitter(mbarrier.MbarrierArriveExpectTx)
mbarrier_expect_tx = emitter(mbarrier.MbarrierExpectTx)
mbarrier_test_wait = emitter(mbarrier.MbarrierTestWait)
mbarrier_wait = emitter(mbarrier.MbarrierWait)

tma_load = tma.load
tma_load_multicast = emitter(tma.TmaLoadMulticast)
tma_store = emitter(tma.TmaStore)
tma_store_hint = emitter(tma.TmaStoreHint)
bulk_commit = emitter(tma.BulkCommit)
bulk_wait_read = emitter(tma.BulkWaitRead)
prefetch_tensor_map = emitter(tma.PrefetchTensorMap)

wgmma_mma = emitter(wgmma.Wgmma)
wgmma_mma_rs = emitter(wgmma.WgmmaRS)
wgmma_fence = emitter(wgmma.WgmmaFence)
wgmma_commit = emitter(wgmma.WgmmaCommit)
wgmma_wait = emitter(wgmma.WgmmaWait)
fence_operand = emitter(wgmma.FenceOperand)

mma_sync = emitter(mma.MmaSync)
wmma_load = emitter(wmma.WmmaLoad)
wmma_load_global = emitter(wmma.WmmaLoadGlobal)
wmma_mma = emitter(wmma.WmmaMma)
wmma_store = emitter(wmma.WmmaStore)
wmma_store_global = emitter(wmma.WmmaStoreGlobal)

cluster_rank = emitter(cluster.ClusterRank)
load_cluster_permutation = emitter(cluster.LoadClusterPermutation)
block_index = emitter(cluster.BlockIndex)
grid_size = emitter(cluster.GridSize)
cluster_arrive_relaxed = emitter(cluster.ClusterArriveRelaxed)
cluster_wait = emitter(cluster.ClusterWait)
mapa = emitter(cluster.Mapa)
store_async = emitter(cluster.StoreAsync)

barrier_sync = emitter(barrier.BarrierSync)
barrier_arrive = emitter(barrier.BarrierArrive)
sync_warp = emitter(barrier.SyncWarp)

fence_proxy_async = emitter(barrier.FenceProxyAsync)
fence_acq_rel = emitter(barrier.FenceAcqRel)

elect_one = emitter(register.ElectOne)
shuffle_xor = emitter(register.ShuffleXor)
shuffle_xor_fp32 = register.shuffle_xor_fp32
shuffle_index = emitter(register.ShuffleIndex)
match_any = emitter(register.MatchAny)
population_count = emitter(register.PopulationCount)
redux = emitter(register.Redux)

load_global = emitter(memory.LoadGlobal)
store_global = emitter(memory.StoreGlobal)
load_global_u8_or_u16 = emitter(memory.LoadGlobalU8OrU16)
store_global_u8_or_u16 = emitter(memory.StoreGlobalU8OrU16)
load_shared = emitter(memory.LoadShared)
load_shared_u8_or_u16 = emitter(memory.LoadSharedU8OrU16)
store_shared = emitter(memory.StoreShared)
store_shared_u16 = emitter(memory.StoreSharedU16)
store_strong = emitter(memory.StoreStrong)
load_global_word = memory.load_global_word
store_global_word = memory.store_global_word
load_shared_word = memory.load_shared_word
store_shared_word = memory.store_shared_word
spin_until_equal = emitter(memory.SpinUntilEqual)
spin_until_at_least = emitter(memory.SpinUntilAtLeast)
atom_add_u32 = emitter(memory.AtomAddU32)
red_add_f32 = emitter(memory.RedAddF32)
red_add_u32 = emitter(memory.RedAddU32)
red_add_vector = emitter(memory.RedAddVector)
red_add_16 = emitter(memory.RedAdd16)

store_matrix = emitter(matrix.StoreMatrix)
load_matrix = emitter(matrix.LoadMatrix)

cp_async_copy = emitter(cp_async.CpAsync)
cp_async_arrive = emitter(cp_async.CpAsyncMbarrierArrive)
cp_async_commit = emitter(cp_async.CpAsyncCommit)
cp_async_wait = emitter(cp_async.CpAsyncWait)

fma = emitter(arithmetic.FusedMultiplyAdd)
dp4a = emitter(arithmetic.Dp4a)
maximum_nan = emitter(arithmetic.MaximumNan)
minimum_nan = emitter(arithmetic.MinimumNan)
select = emitter(arithmetic.Select)
select_less = emitter(arithmetic.SelectLess)
divide_full = emitter(arithmetic.DivideFull)
sfu_approximation = emitter(arithmetic.SfuApproximation)
math_library_call = emitter(arithmetic.MathLibraryCall)
power = emitter(arithmetic.Power)

pack = emitter(convert.Pack)
unpack = emitter(convert.Unpack)
pack_fp8 = emitter(convert.PackFp8)
unpack_fp8 = emitter(convert.UnpackFp8)
pack_int8 = emitter(convert.PackInt8)
tf32_residual = convert.tf32_residual
as_float = emitter(convert.AsFloat)
as_unsigned = emitter(convert.AsUnsigned)


def grid_dependency_wait() -> None:
    """Emit griddepcontrol.wait, which waits for the prerequisite grids. Emits nothing before sm_90."""
    if _current_builder().chip.supports(barrier.GridDependencyWait.required_arch):
        barrier.GridDependencyWait().issue()


def launch_dependent_grids() -> None:
    """Emit griddepcontrol.launch_dependents, which lets dependent grids start. Emits nothing before sm_90."""
    if _current_builder().chip.supports(barrier.LaunchDependentGrids.required_arch):
        barrier.LaunchDependentGrids().issue()


def sync_threads() -> None:
    """Emit __syncthreads, a barrier of all threads of the CTA."""
    barrier.SyncThreads(_current_builder().threads).issue()
