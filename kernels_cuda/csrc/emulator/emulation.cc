// What the emulation offers beside the ABI of the kernels: how it runs. Of one piece with what is no kernel of attention,
// since most of the time goes into reading the headers.
#include "common.cu"

extern "C" {

// From here on, run in this mode (eager, late, crossed: 0, 1, 2) and from this seed; see machine.h.
RA_API void ra_emulate(int mode, uint64_t seed) {
  std::lock_guard<std::mutex> const alone(emu::machine.busy);
  emu::machine.mode = emu::Mode(mode);
  emu::machine.seed = emu::machine.random_state = seed;
}

// From here on, run no more of a grid's blocks than so many, its last ones: for results that are too large to compute.
RA_API void ra_emulate_last(int64_t blocks) {
  std::lock_guard<std::mutex> const alone(emu::machine.busy);
  emu::machine.most_blocks = blocks;
}

}  // extern "C"
