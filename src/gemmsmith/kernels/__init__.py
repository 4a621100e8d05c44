"""Kernels in the language, a file each: the designs of a GEMM, and those that pack operands and end reductions.

The names here are what a kernel or a `gemmsmith.Design` of your own is composed of.
"""

from gemmsmith.collective.accumulator import Accumulator as Accumulator
from gemmsmith.collective.cp_async_mainloop import CpAsyncMainloop as CpAsyncMainloop
from gemmsmith.collective.cp_async_mainloop import CpAsyncStages as CpAsyncStages
from gemmsmith.collective.pipeline import PipelineState as PipelineState
from gemmsmith.collective.pipeline import PipelineTmaAsync as PipelineTmaAsync
from gemmsmith.collective.pipeline import init_barriers as init_barriers
from gemmsmith.collective.swizzle import ThreadCopyPartition as ThreadCopyPartition
from gemmsmith.collective.swizzle import swizzled_vector_offset as swizzled_vector_offset
from gemmsmith.collective.tma_mainloop import TmaMainloop as TmaMainloop
from gemmsmith.collective.tma_mainloop import TmaProducer as TmaProducer
from gemmsmith.collective.tma_mainloop import TmaStages as TmaStages
from gemmsmith.collective.tma_operand import TmaOperand as TmaOperand
from gemmsmith.core.mma import A_FRAGMENT as A_FRAGMENT
from gemmsmith.core.mma import B_FRAGMENT as B_FRAGMENT
from gemmsmith.core.mma import D_FRAGMENT as D_FRAGMENT
from gemmsmith.core.mma import MMA_SYNC as MMA_SYNC
from gemmsmith.core.mma import WGMMA as WGMMA
from gemmsmith.core.mma import Fragment as Fragment
from gemmsmith.core.mma import select_mma as select_mma
from gemmsmith.core.problem import BoundProblem as BoundProblem
from gemmsmith.core.problem import Matrix as Matrix
from gemmsmith.core.problem import Problem as Problem
from gemmsmith.core.spec import KernelSpec as KernelSpec
from gemmsmith.core.spec import MmaOperand as MmaOperand
from gemmsmith.epilogue.collective_epilogue import Epilogue as Epilogue
from gemmsmith.kernels.cooperative import consumer_loop as consumer_loop
from gemmsmith.kernels.cooperative import record_cooperative as record_cooperative
from gemmsmith.tile_scheduler import make_tile_scheduler as make_tile_scheduler
from gemmsmith.tile_scheduler.tiles import OperandCoord as OperandCoord
from gemmsmith.tile_scheduler.tiles import TileScheduler as TileScheduler
from gemmsmith.tile_scheduler.tiles import WorkRange as WorkRange
from gemmsmith.tile_scheduler.tiles import WorkTile as WorkTile
