// The C ABI of the CUDA kernels by plain loops on the host: quick, and independent of the kernels and their emulation.
// It sees a call as the front ends describe it (pointers, strides, lengths, partial results), and refuses one that
// api.h does not allow with the code 1000 + the number of the condition, so that tests can tell.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "api.h"

namespace {

float from_bf16(uint16_t bits) {
  uint32_t const wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_e4m3(uint8_t code) {
  int const exponent = code >> 3 & 15, fraction = code & 7;
  float const size = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
  return (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
}
float load(const void* base, int64_t place, int64_t dtype) {
  if (dtype == RA_BFLOAT16) return from_bf16(static_cast<const uint16_t*>(base)[place]);
  return static_cast<const _Float16*>(base)[place];
}

std::vector<float> key_at(RaLatent const& call, int64_t page, int64_t place, int64_t head) {
  std::vector<float> key(call.d_qk);
  int64_t const first = page * call.page_stride + place * call.slot_stride + head * call.head_stride;
  if (call.format == RA_PLAIN) {
    for (int64_t i = 0; i < call.d_qk; ++i) key[i] = load(call.kv, first + i, call.dtype);
    return key;
  }
  const uint8_t* row = static_cast<const uint8_t*>(call.kv) + first;
  float scales[4];
  memcpy(scales, row + 512, 16);
  for (int i = 0; i < 512; ++i) key[i] = from_e4m3(row[i]) * scales[i / 128];
  for (int i = 0; i < 64; ++i) {
    uint16_t bits;
    memcpy(&bits, row + 528 + 2 * i, 2);
    key[512 + i] = from_bf16(bits);
  }
  return key;
}

// One row of queries.
void attend(RaLatent const& call, int64_t seq, int64_t token, int64_t head) {
  int64_t const kv_head = head / (call.num_q_heads / call.num_kv_heads);
  int64_t const most = call.sparse ? call.list_length : call.list_length * call.page_size;
  int64_t count = most;
  if (call.lens) count = call.lens[seq * call.lens_seq_stride + token * call.lens_token_stride];
  count = std::clamp<int64_t>(count, 0, most);
  if (call.causal) count = std::max<int64_t>(count - (call.num_q_tokens - 1 - token), 0);
  const int32_t* list = call.lists + seq * call.list_seq_stride + token * call.list_token_stride + kv_head * call.list_head_stride;
  int64_t const query = seq * call.q_seq_stride + token * call.q_token_stride + head * call.q_head_stride;
  std::vector<std::vector<float>> keys;
  std::vector<double> logits;
  double largest = -INFINITY, sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t const slot = call.sparse ? list[i] : list[i / call.page_size] * call.page_size + i % call.page_size;
    if (slot < 0 || slot >= call.num_pages * call.page_size) continue;
    keys.push_back(key_at(call, slot / call.page_size, slot % call.page_size, kv_head));
    double dot = 0;
    for (int64_t d = 0; d < call.d_qk; ++d) dot += load(call.q, query + d, call.dtype) * keys.back()[d];
    logits.push_back(dot * call.sm_scale);
    largest = std::max(largest, logits.back());
  }
  std::vector<double> out(512, 0.0);
  for (size_t i = 0; i < keys.size(); ++i) {
    double const weight = exp(logits[i] - largest);
    sum += weight;
    for (int d = 0; d < 512; ++d) out[d] += weight * keys[i][d];
  }
  double const lse = keys.empty() ? -INFINITY : largest + log(sum);
  double scale = keys.empty() ? 0 : 1 / sum;
  if (call.sinks && !keys.empty()) scale /= 1 + exp(call.sinks[head] - lse);
  int64_t const row = (seq * call.num_q_tokens + token) * call.num_q_heads + head;
  int64_t const place = (seq * call.num_q_heads + head) * call.num_q_tokens + token;
  for (int d = 0; d < 512; ++d) {
    if (call.dtype == RA_BFLOAT16) static_cast<uint16_t*>(call.out)[512 * row + d] = to_bf16(float(out[d] * scale));
    else static_cast<_Float16*>(call.out)[512 * row + d] = _Float16(out[d] * scale);
  }
  call.lse[place] = float(lse);
  if (call.max_logits) call.max_logits[place] = float(largest);
}

bool aligned(const void* base, std::initializer_list<int64_t> strides, int64_t size) {
  bool whole = reinterpret_cast<uintptr_t>(base) % 16 == 0;
  for (int64_t stride : strides) whole &= stride * size % 16 == 0;
  return whole;
}

int run(RaLatent const& call, bool sparse, int format) {
  bool const whole = !call.parts && call.num_splits == 1;
  int64_t const partials = whole ? 0 : call.parts ? 2 * call.num_parts : call.num_seqs * call.num_splits;
  int64_t const size = call.format == RA_PLAIN ? 2 : 1;
  bool const valid[] = {
      call.sparse == sparse && call.format == format,
      aligned(call.q, {call.q_seq_stride, call.q_token_stride, call.q_head_stride}, 2),
      aligned(call.kv, {call.page_stride, call.slot_stride, call.head_stride}, size),
      call.num_partials == partials && (partials == 0) == (call.partial_out == nullptr),
      (call.partial_out == nullptr) == (call.partial_lse == nullptr),
      (call.partial_max != nullptr) == (call.max_logits && partials),
      call.parts || call.num_parts == call.num_seqs * call.num_splits,
      call.out != nullptr && call.lse != nullptr,
      call.sm_scale != 700,
  };
  for (int i = 0; i < 9; ++i) {
    if (!valid[i] && call.num_seqs) return 1000 + i;
  }
  if (call.partial_out) {  // its last entry must be there
    call.partial_out[partials * call.num_q_tokens * call.num_q_heads * 512 - 1] = 0;
    call.partial_lse[partials * call.num_q_tokens * call.num_q_heads - 1] = 0;
  }
  for (int64_t seq = 0; seq < call.num_seqs; ++seq)
    for (int64_t token = 0; token < call.num_q_tokens; ++token)
      for (int64_t head = 0; head < call.num_q_heads; ++head) attend(call, seq, token, head);
  return 0;
}

int64_t blocks(RaSchedule const& call, int64_t seq, bool least) {
  int64_t keys = std::max<int64_t>(call.lens[seq], call.sparse ? 1 : 0);
  if (call.extra_lens) keys = (keys + 63) / 64 * 64 + std::max(call.extra_lens[seq], 0);
  return std::max<int64_t>((keys + 63) / 64, least);
}

}  // namespace

extern "C" {
RA_API int ra_abi_version(void) { return RA_ABI_VERSION; }
RA_API int64_t ra_size_of_latent(void) { return sizeof(RaLatent); }
RA_API int64_t ra_size_of_schedule(void) { return sizeof(RaSchedule); }
RA_API int ra_status(int, int*, int*, int*) { return RA_WRONG_DEVICE; }
RA_API void ra_versions(int* driver, int* runtime) { *driver = *runtime = 0; }
RA_API const char* ra_error_string(int) { return "said by plain_abi.cc"; }
RA_API void ra_emulate(int, uint64_t) {}
RA_API int ra_mla_decode_dense(const RaLatent* call, void*) { return run(*call, false, RA_PLAIN); }
RA_API int ra_sparse_mla_prefill(const RaLatent* call, void*) { return run(*call, true, RA_PLAIN); }
RA_API int ra_mla_decode_sparse_fp8(const RaLatent* call, void*) { return run(*call, true, RA_FP8_V32); }
RA_API int ra_mla_decode_sparse_fp8_narrow(const RaLatent* call, void*) {
  return call->num_q_heads <= 32 ? run(*call, true, RA_FP8_V32) : RA_NO_KERNEL;
}
RA_API int ra_mla_decode_sparse_fp8_v4(const RaLatent*, void*) { return RA_NO_KERNEL; }
RA_API int ra_mla_decode_sparse_v41(const RaLatent*, void*) { return RA_NO_KERNEL; }

RA_API int ra_make_decode_schedule(const RaSchedule* call, void*) {
  int64_t total = 0, seq = 0, block = 0, split = 0;
  for (int64_t i = 0; i < call->num_seqs; ++i) total += blocks(*call, i, true) + call->overhead;
  int64_t const payload = (total + call->num_parts - 1) / call->num_parts + call->overhead;
  call->num_splits[0] = 0;
  for (int64_t part = 0; part < call->num_parts; ++part) {
    int32_t row[8] = {int32_t(seq), int32_t(block), 0, 0, int32_t(split), 0, 0, 0};
    int64_t budget = payload;
    while (seq < call->num_seqs && budget >= blocks(*call, seq, true) - block + call->overhead) {
      budget -= blocks(*call, seq, true) - block + call->overhead;
      call->num_splits[seq + 1] = call->num_splits[seq] + int32_t(split) + 1;
      ++seq, block = split = 0;
    }
    if (seq < call->num_seqs && budget > call->overhead) block += budget - call->overhead, ++split;
    row[2] = int32_t(block ? seq : seq - 1);
    row[3] = int32_t(block ? block : seq ? blocks(*call, seq - 1, false) : 0);
    memcpy(call->parts + 8 * part, row, sizeof row);
  }
  return 0;
}
}
