// Functions that control the emulation, in addition to the kernels' ABI. This file includes common.cu, because
// compiling them together reads the headers, which take most of the time, only once.
#include "common.cu"

extern "C" {

// Sets the mode (0 eager, 1 late, 2 crossed) and the seed of later launches. machine.h explains both.
RA_API void ra_emulate(int mode, uint64_t seed) {
  std::lock_guard<std::mutex> const alone(emu::machine.busy);
  emu::machine.mode = emu::Mode(mode);
  emu::machine.seed = emu::machine.random_state = seed;
}

// Makes later launches run only the last `blocks` blocks of a grid. Tests use it if the whole grid would take too long.
RA_API void ra_emulate_last(int64_t blocks) {
  std::lock_guard<std::mutex> const alone(emu::machine.busy);
  emu::machine.most_blocks = blocks;
}

}  // extern "C"
