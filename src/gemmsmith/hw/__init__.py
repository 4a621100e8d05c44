"""PTX instructions, one module per family.

Each class defines operands, PTX and simulated semantics; the functions here record one instruction.
"""

from gemmsmith.hw import (
    arithmetic,
    barrier,
    cluster,
    convert,
    cp_async,
    fence,
    matrix,
    mbarrier,
    memory,
    mma,
    register,
    tma,
    wgmma,
    wmma,
)
from gemmsmith.hw.convert import pack as pack
from gemmsmith.hw.convert import round_pair as round_pair
from gemmsmith.hw.convert import unpack as unpack
from gemmsmith.hw.convert import unpack_pair as unpack_pair
from gemmsmith.hw.convert import unpack_ue8m0 as unpack_ue8m0
from gemmsmith.hw.register import opaque as opaque
from gemmsmith.hw.register import set_registers as set_registers
from gemmsmith.hw.wgmma import descriptor as descriptor
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.location import hide_frames

hide_frames(__file__)

mbarrier_init = mbarrier.MbarrierInit.emit
fence_mbarrier_init = mbarrier.FenceMbarrierInit.emit
mbarrier_arrive = mbarrier.MbarrierArrive.emit
mbarrier_arrive_remote = mbarrier.MbarrierArriveRemote.emit
mbarrier_arrive_expect_tx = mbarrier.MbarrierArriveExpectTx.emit
mbarrier_expect_tx = mbarrier.MbarrierExpectTx.emit
mbarrier_test_wait = mbarrier.MbarrierTestWait.emit
mbarrier_wait = mbarrier.MbarrierWait.emit

tma_load = tma.load
tma_load_multicast = tma.TmaLoadMulticast.emit
tma_store = tma.TmaStore.emit
tma_store_hint = tma.TmaStoreHint.emit
bulk_commit = tma.BulkCommit.emit
bulk_wait = tma.BulkWait.emit
bulk_wait_read = tma.BulkWaitRead.emit
prefetch_tensor_map = tma.PrefetchTensorMap.emit

wgmma_mma = wgmma.Wgmma.emit
wgmma_mma_rs = wgmma.WgmmaRS.emit
wgmma_fence = wgmma.WgmmaFence.emit
wgmma_commit = wgmma.WgmmaCommit.emit
wgmma_wait = wgmma.WgmmaWait.emit
fence_operand = wgmma.FenceOperand.emit

mma_sync = mma.MmaSync.emit
wmma_load = wmma.WmmaLoad.emit
wmma_load_global = wmma.WmmaLoadGlobal.emit
wmma_mma = wmma.WmmaMma.emit
wmma_store = wmma.WmmaStore.emit
wmma_store_global = wmma.WmmaStoreGlobal.emit

cluster_rank = cluster.ClusterRank.emit
load_cluster_permutation = cluster.LoadClusterPermutation.emit
block_index = cluster.BlockIndex.emit
grid_size = cluster.GridSize.emit
cluster_arrive = cluster.ClusterArrive.emit
cluster_arrive_relaxed = cluster.ClusterArriveRelaxed.emit
cluster_wait = cluster.ClusterWait.emit
mapa = cluster.Mapa.emit
load_cluster = cluster.LoadCluster.emit
store_cluster = cluster.StoreCluster.emit
store_async = cluster.StoreAsync.emit

barrier_sync = barrier.BarrierSync.emit
barrier_arrive = barrier.BarrierArrive.emit
sync_warp = barrier.SyncWarp.emit

fence_proxy_async = fence.FenceProxyAsync.emit
fence_acq_rel = fence.FenceAcqRel.emit

elect_one = register.ElectOne.emit
shuffle_xor = register.ShuffleXor.emit
shuffle_xor_fp32 = register.shuffle_xor_fp32
shuffle_index = register.ShuffleIndex.emit
shuffle_down = register.ShuffleDown.emit

load_global = memory.LoadGlobal.emit
store_global = memory.StoreGlobal.emit
load_global_u8_or_u16 = memory.LoadGlobalU8OrU16.emit
store_global_u8_or_u16 = memory.StoreGlobalU8OrU16.emit
load_shared = memory.LoadShared.emit
load_shared_u8_or_u16 = memory.LoadSharedU8OrU16.emit
store_shared = memory.StoreShared.emit
store_shared_u16 = memory.StoreSharedU16.emit
load_strong = memory.LoadStrong.emit
store_strong = memory.StoreStrong.emit
load_global_word = memory.load_global_word
store_global_word = memory.store_global_word
load_shared_word = memory.load_shared_word
store_shared_word = memory.store_shared_word
spin_until_equal = memory.SpinUntilEqual.emit
spin_until_at_least = memory.SpinUntilAtLeast.emit
atom_add_u32 = memory.AtomAddU32.emit
red_add_f32 = memory.RedAddF32.emit
red_add_u32 = memory.RedAddU32.emit

store_matrix = matrix.StoreMatrix.emit
load_matrix = matrix.LoadMatrix.emit

cp_async_copy = cp_async.CpAsync.emit
cp_async_arrive = cp_async.CpAsyncMbarrierArrive.emit
cp_async_commit = cp_async.CpAsyncCommit.emit
cp_async_wait = cp_async.CpAsyncWait.emit

fma = arithmetic.FusedMultiplyAdd.emit
fma_fp16 = arithmetic.FusedMultiplyAddFp16.emit
dp4a = arithmetic.Dp4a.emit
maximum_nan = arithmetic.MaximumNan.emit
minimum_nan = arithmetic.MinimumNan.emit
divide_full = arithmetic.DivideFull.emit
sfu_approximation = arithmetic.SfuApproximation.emit
math_library_call = arithmetic.MathLibraryCall.emit
power = arithmetic.Power.emit

unpack_fp16 = convert.UnpackFp16.emit
pack_fp8 = convert.PackFp8.emit
unpack_fp8 = convert.UnpackFp8.emit
pack_int8 = convert.PackInt8.emit
round_tf32 = convert.RoundTf32.emit
tf32_residual = convert.tf32_residual
as_float = convert.AsFloat.emit
as_unsigned = convert.AsUnsigned.emit


def grid_dependency_wait() -> None:
    """Emit griddepcontrol.wait, which waits for the prerequisite grids. Emits nothing before sm_90."""
    if current_builder().chip.supports(fence.GridDependencyWait.required_arch):
        fence.GridDependencyWait.emit()


def launch_dependent_grids() -> None:
    """Emit griddepcontrol.launch_dependents, which lets dependent grids start. Emits nothing before sm_90."""
    if current_builder().chip.supports(fence.LaunchDependentGrids.required_arch):
        fence.LaunchDependentGrids.emit()


def sync_threads() -> None:
    """Emit __syncthreads, a barrier of all threads of the CTA."""
    barrier.SyncThreads.emit(current_builder().threads)
