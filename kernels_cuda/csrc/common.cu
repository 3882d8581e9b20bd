// The library's functions other than attention: the schedule, and queries about devices, versions and errors.
#include "schedule.h"

extern "C" {

int ra_make_decode_schedule(RaSchedule const* call, void* stream) {
  if (call->num_parts < 1 || call->num_seqs > kMostKeys || call->num_parts > kMostKeys) return RA_NO_KERNEL;
  if (call->overhead < 0 || call->overhead > kMostKeys) return RA_NO_KERNEL;
  return op::launch<Deal>(1, sizeof(Deal::Smem), stream, *call);
}

int ra_abi_version(void) { return RA_ABI_VERSION; }
int64_t ra_size_of_latent(void) { return sizeof(RaLatent); }
int64_t ra_size_of_schedule(void) { return sizeof(RaSchedule); }

#ifdef RA_EMULATE

int ra_status(int, int* major, int* minor, int* num_multiprocessors) {
  *major = 9;
  *minor = 0;
  *num_multiprocessors = 132;
  return 0;
}
void ra_versions(int* driver, int* runtime) { *driver = *runtime = 0; }
// The text for RA_DEADLOCK says what the threads of the last launch waited for, or which undefined operation one of
// them performed.
static char const* text_of(int code) { return code == RA_DEADLOCK ? emu::machine.report.c_str() : "no error"; }

#else

int ra_status(int device, int* major, int* minor, int* num_multiprocessors) {
  *major = *minor = *num_multiprocessors = 0;
  if (int error = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device)) return error;
  if (int error = cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device)) return error;
  if (int error = cudaDeviceGetAttribute(num_multiprocessors, cudaDevAttrMultiProcessorCount, device)) return error;
  return *major == 9 && *minor == 0 ? 0 : RA_WRONG_DEVICE;
}
void ra_versions(int* driver, int* runtime) {
  if (cudaDriverGetVersion(driver)) *driver = 0;
  if (cudaRuntimeGetVersion(runtime)) *runtime = 0;
}
static char const* text_of(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

#endif

char const* ra_error_string(int code) {
  if (code == RA_WRONG_DEVICE) return "the device is not of architecture sm_90";
  if (code == RA_NO_KERNEL) return "no kernel was compiled for these arguments";
  if (code == RA_NO_TENSOR_MAP) return "no tensor map could be made of the cache's pages";
  return text_of(code);
}

}  // extern "C"
