// The emulation's functions beside the kernels' ABI, which control how it runs. They are compiled together with common.cu,
// because reading the headers takes most of the time.
#include "common.cu"

extern "C" {

// Sets the mode (0 eager, 1 late, 2 crossed) and the seed of later launches; see machine.h.
RA_API void ra_emulate(int mode, uint64_t seed) {
  std::lock_guard<std::mutex> const alone(emu::machine.busy);
  emu::machine.mode = emu::Mode(mode);
  emu::machine.seed = emu::machine.random_state = seed;
}

// Makes later launches run only the last `blocks` blocks of a grid, for results that are too large to compute.
RA_API void ra_emulate_last(int64_t blocks) {
  std::lock_guard<std::mutex> const alone(emu::machine.busy);
  emu::machine.most_blocks = blocks;
}

}  // extern "C"
