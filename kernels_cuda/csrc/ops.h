// The machine layer. A kernel body is written once, in terms of `op`, and compiled for two machines:
//
//   nvcc                     sm90/hopper.h: instructions of sm_90a
//   g++ -DRA_EMULATE         emulator/emulated.h: an emulation on a CPU thread that detects undefined behaviour
//
// An "ordinary write" is a write to shared memory by the generic proxy. wgmma and TMA use the async proxy, which sees
// the write only after a proxy fence. Both machines define
//
//   tid, bid                                    the thread's index in its block, the block's index in the grid
//   fresh_tid, fresh_bid                        the same indices, read anew so that no register holds them in between
//   opaque                                      returns a pointer, but hides its origin from the compiler
//   bytes_of                                    selects four bytes of two words by the hex digits of a selector
//   reg_alloc<N>, reg_dealloc<N>                set the registers per thread of this warpgroup
//   syncthreads, syncwarp, named_sync, named_arrive, shfl_xor, shfl
//   any_in_warp                                 returns whether a condition holds for any thread of the warp
//   MBar: init, arrive, arrive_expect, wait     an mbarrier, which counts arrivals and bytes and has a phase bit
//   fence_barrier_init                          makes initialised mbarriers visible to the async proxy
//   fence_async_shared                          makes ordinary writes visible to the async proxy
//   load_constant                               loads from global memory that no running kernel writes
//   load16<Reuse>, load8<Reuse>, load4          load 16, 8 or 4 bytes, or return zeros if `valid` is false
//   copy16<Reuse>                               copies 16 bytes, or zeros, to shared memory asynchronously
//   arrive_after_copies                         arrives at an mbarrier once this thread's earlier copies have landed
//   bulk_load                                   copies contiguous bytes asynchronously; an mbarrier counts them
//   make_tma                                    describes a (rows, columns, (heads, pages)) tensor for TMA
//   descriptor_of                               returns the tensor map of this description
//   tma_load                                    loads a 64 x 64 tile of the tensor; an mbarrier counts the bytes
//   store                                       an ordinary write to memory that the async proxy uses too
//   store_matrices                              a warp's ordinary write of four 8 x 8 matrices of 16 bits (stmatrix)
//   load_matrices                               the inverse of store_matrices (ldmatrix)
//   wgmma_ss, wgmma_rs                          issue asynchronous products into an accumulator
//   wgmma_wait<N>                               waits until at most N products are in flight; its arguments are the
//                                               accumulators that are then complete
//   mma<T>                                      computes a warp's 16 x 8 x 16 products synchronously, from registers
//   exp2, log2, reciprocal                      2^x, the base-2 logarithm, 1/x
//   pack<T>                                     packs two floats into a word of two T
//   multiply                                    multiplies two pairs of bfloat16
//   half_pair, half_pairs                       convert two e4m3 codes to a word of float16, four codes to two words
//   low_half, high_half                         convert the low or the high float16 of a word to float
//   launch                                      launches blocks that run Body::run(params, shared memory)
//   launch_dependent                            launches a grid that may start once each block of the previous grid has
//                                               called let_dependents_launch or ended
//   let_dependents_launch                       lets the dependent grid start, as far as this block is concerned
//   wait_for_previous_grid                      waits for the end of the previous grid; every thread must call it
//   load_result                                 loads a result of the previous grid, after that wait
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

using bf16 = cutlass::bfloat16_t;
using f16 = cutlass::half_t;

// Whether loaded data will be read again soon. Rows of keys will be, because adjacent threads and other thread blocks
// read them.
enum Reuse { kOnce, kAgain };

#ifdef RA_EMULATE
#include "emulator/emulated.h"
#else
#include "sm90/hopper.h"
#endif
