// What the emulation offers beside the ABI of the kernels: how it runs, and what became of it.
#include "api.h"
#include "ops.h"

extern "C" {

// From here on, run in this mode (eager, late, crossed: 0, 1, 2) and from this seed; see machine.h.
RA_API void ra_emulate(int mode, uint64_t seed) {
  std::lock_guard<std::mutex> const alone(emu::machine.busy);
  emu::machine.mode = emu::Mode(mode);
  emu::machine.seed = emu::machine.random_state = seed;
}

// Of the last launch that returned RA_DEADLOCK: who waits for what, or what it did that the hardware does not define.
RA_API char const* ra_emulation_report(void) { return emu::machine.report.c_str(); }

}  // extern "C"
