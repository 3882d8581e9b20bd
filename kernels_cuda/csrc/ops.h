// The machine layer: a kernel body is written once, in terms of `op`, and compiled twice.
//
//   nvcc                     sm90/hopper.h: the instructions of sm_90a
//   g++ -DRA_EMULATE         emulator/emulated.h: the same on CPU threads, with what the hardware leaves open made visible
//
// Both offer
//   tid, bid, fresh_tid, fresh_bid              thread in the block, block in a one-dimensional grid; fresh: read again
//   opaque                                      the same pointer, whose origin the compiler forgets
//   bytes_of                                    four bytes of two words, chosen by the digits of a selector
//   reg_alloc<N>, reg_dealloc<N>                registers a thread of this warpgroup, from here on
//   syncthreads, syncwarp, named_sync, named_arrive, shfl_xor, shfl
//   any_in_warp                                 whether a condition holds for a thread of the warp
//   MBar: init, arrive, arrive_expect, wait     a barrier of arrivals and bytes, with a phase bit
//   fence_barrier_init, fence_async_shared      the latter between ordinary writes and wgmma's or TMA's view of them
//   load_constant                               a number of global memory that no kernel at work writes
//   load16<Reuse>, load8<Reuse>, load4          so many bytes of global memory, zeros where there is nothing to load
//   copy16<Reuse>, arrive_after_copies          16 bytes asynchronously to shared memory, zeros likewise
//   bulk_load                                   a row's bytes, at an mbarrier as those of a load by TMA
//   make_tma, descriptor_of, tma_load           tiles of 64 x 64 of a (rows, columns, (heads, pages)) tensor
//   store                                       an ordinary write of what wgmma will read
//   store_matrices                              four matrices of 8 x 8 16-bit numbers, by a warp, otherwise likewise
//   load_matrices                               the converse
//   wgmma_ss, wgmma_rs, wgmma_wait<N>           asynchronous products; the wait names the accumulators it settles
//   mma<T>                                      synchronous products of a warp, 16 x 8 x 16 each, of registers
//   exp2, log2, reciprocal, pack<T>             2^x, the base-2 logarithm, 1/x, two floats as one word of T
//   multiply                                    the products of two bfloat16 each
//   half_pair, low_half, high_half              two e4m3 codes as a word of float16, and its two as float
//   half_pairs                                  four e4m3 codes as two such words
//   launch                                      a grid of blocks that run Body::run(params, shared memory)
//   launch_dependent                            likewise, as soon as all blocks of the grid before let it or have ended
//   let_dependents_launch                       this block lets it
//   wait_for_grid_before, given                 until that has ended, in every thread; what it wrote to global memory
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

using bf16 = cutlass::bfloat16_t;
using f16 = cutlass::half_t;

// Whether what is loaded will be asked for again, by this thread's neighbours or by other thread blocks, as rows of keys are.
enum Reuse { kOnce, kAgain };

#ifdef RA_EMULATE
#include "emulator/emulated.h"
#else
#include "sm90/hopper.h"
#endif
