// Runs the threads of a block on one CPU thread, for emulated.h. Each emulated thread is a fiber that runs until it has
// to wait.
//
// Like the hardware, the machine decides which thread runs next and when asynchronous operations happen. It has three
// modes. In eager mode, copies and products happen at once. In late mode, copies happen when no thread can run, and
// products when they are waited for. In crossed mode, copies happen at once and products late, and warpgroups have an
// order: a warpgroup runs only while no earlier one can. This exposes memory that is released too early. With seed 0,
// threads run in turn, and in crossed mode the last warpgroup is the first in the order. Any other seed selects a
// reproducible random order of threads and, in crossed mode, of warpgroups. If no thread can run and nothing is in
// flight, the machine reports a deadlock.
//
// Two mechanisms track which thread knows of which operation. Vector clocks tell whether a proxy fence covers a write.
// ThreadSanitizer, if compiled in, treats each fiber as a thread, and each engine that copies or multiplies. An
// operation is reported to it as synchronisation only if it orders memory on the hardware; a shuffle does not.
#pragma once
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
void AnnotateIgnoreReadsBegin(char const* file, int line);
void AnnotateIgnoreReadsEnd(char const* file, int line);
void AnnotateIgnoreWritesBegin(char const* file, int line);
void AnnotateIgnoreWritesEnd(char const* file, int line);
}
#endif

namespace emu {

// Calls to ThreadSanitizer. Without the sanitizer, these functions do nothing.
namespace watch {
#ifdef __SANITIZE_THREAD__
inline void acquire(void* tag) { __tsan_acquire(tag); }
inline void release(void* tag) { __tsan_release(tag); }
inline void* self() { return __tsan_get_current_fiber(); }
inline void become(void* who) { __tsan_switch_to_fiber(who, 1); }  // 1: the switch does not synchronise
inline void* create() { return __tsan_create_fiber(0); }
inline void hide() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
inline void show() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__), AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
constexpr bool kOn = true;
#else
inline void acquire(void*) {}
inline void release(void*) {}
inline void* self() { return nullptr; }
inline void become(void*) {}
inline void* create() { return nullptr; }
inline void hide() {}
inline void show() {}
constexpr bool kOn = false;
#endif

// A scope whose memory accesses are the emulator's own. It hides them from the sanitizer.
struct Unseen {
  Unseen() { hide(); }
  ~Unseen() { show(); }
};
// These functions make accesses within an `Unseen` scope that count as the kernel's.
template <class T>
void reads(T const* values, int const* offsets, int count) {
  if (!kOn) return;
  show();
  for (int i = 0; i < count; ++i) (void)*const_cast<T const volatile*>(values + offsets[i]);
  hide();
}
inline void writes(unsigned char volatile* bytes, uint32_t size) {
  if (!kOn) return;
  show();
  for (uint32_t i = 0; i < size; ++i) bytes[i] = bytes[i];
  hide();
}

// The sanitizer's fiber for one thread of a block. All blocks of a grid reuse it.
struct Thread {
  void* who = create();
  bool hidden = false;  // whether the thread of an earlier block has left its accesses hidden
};

// An engine that works concurrently with the threads. To the sanitizer, the engine's work comes after what was
// released to the tag `begin` and before what acquires the tag `end`; it is concurrent with everything else.
struct Engine {
  void* who = nullptr;
  template <class Work>
  void run(void* begin, void* end, Work work) {
    if (who == nullptr) who = create();
    void* const caller = self();
    become(who);
    acquire(begin);
    work();
    release(end);
    become(caller);
  }
};
}  // namespace watch

constexpr int kMostThreads = 1024, kNobody = -1, kWarp = 32, kGroup = 128;
constexpr size_t kStack = 256 << 10, kPage = 4096, kSwizzle = 1024;
constexpr int kMostShared = 232448;  // bytes of shared memory per block on sm_90
constexpr int kRegisters = 65536;    // registers per multiprocessor
constexpr int kMostRegisters = 255;  // registers per thread

enum Mode { kEager = 0, kLate = 1, kCrossed = 2 };

// A vector clock. The first half has the last known epoch of each thread's operations, the second half that of its
// asynchronous copies. An arrival of copies passes on only the latter; any other arrival passes on both.
using Clock = std::array<uint32_t, 2 * kMostThreads>;

// A write by the generic proxy that no proxy fence has covered yet.
struct Write {
  uint32_t offset, epoch, size;
  unsigned char bytes[16];
};

// The threads that wait for one event.
using Line = std::vector<int>;

// The clock that a barrier passes on in each phase, from the arriving threads to the threads that it releases.
struct Passage {
  Clock given{}, taken{};
  unsigned turn = 0;
  char tags[2];
  Line line;
};

struct NamedBarrier : Passage {
  int count = 0, of = 0;  // threads that have arrived; threads expected
};

struct CountedBarrier : Passage {  // an mbarrier
  int of = 0, pending = 0, made_by = 0;  // arrivals per phase; arrivals still missing; thread that initialised it
  int64_t bytes = 0;                     // expected bytes that have not landed yet
  uint32_t made_at = 0;
  bool fenced = false;  // whether fence_barrier_init has made it visible to the async proxy
  char loads;  // tag for the sanitizer
};

// An asynchronous copy of a thread, or an arrival at a barrier after the thread's earlier copies have landed.
struct Copy {
  uint32_t offset, epoch;
  void const* source;   // null: copy zeros
  CountedBarrier* bar;  // null: this is a copy, not an arrival
};

// The event that a thread waits for. Reports of deadlocks name it.
struct Reason {
  char const* what = nullptr;  // format with two %ld
  long first, second;
};

struct Fiber {
  ucontext_t context;
  void* seen = nullptr;
  Clock clock;
  int registers;
  Reason waits_for;
  std::deque<Copy> copies;
  std::vector<Write> stored, landed;  // unfenced ordinary writes; unfenced copies; both in the order of their epochs
  char copied;                        // tag for the sanitizer
  bool waited = false;                // whether it has waited for the previous grid
};

// A product of a warp. It can be computed once each lane has added its share.
struct Product {
  int lanes = 0;
  bool done = false;
  std::array<float*, kWarp> sums{};
  void const* operand = nullptr;
  std::vector<float> left;  // left operand, if it is in registers
  std::function<void(Product&)> multiply;
};

// A lane's operands and accumulators of synchronous products.
struct Fragment {
  uint32_t const *a, *b;
  float* acc;
};

struct Warp : Passage {
  int count = 0;              // number of lanes that have arrived
  char const* at = nullptr;  // instruction at which these lanes have arrived
  float lanes[2][kWarp];
  Fragment fragments[kWarp];
  uint32_t matrices[2][kWarp][4];
  std::deque<Product> products;
  uint64_t settled = 0;                   // number of completed products, which have left the list
  std::array<uint64_t, kWarp> issued{};
  char begun, ended;                      // tags for the sanitizer
};

struct Machine {
  Mode mode = kEager;
  uint64_t seed = 0;
  int64_t most_blocks = INT64_MAX;  // run only this many of a grid's last blocks, for tests of large offsets
  std::string report;

  int current = kNobody, threads = 0, block = 0, done = 0;
  bool failed = false;
  unsigned char* shared = nullptr;  // memory of the generic proxy; that of the async proxy begins `apart` bytes later
  size_t shared_bytes = 0, apart = 0;
  int free_registers = 0;
  Line for_registers;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::array<NamedBarrier, 16> named;
  std::deque<CountedBarrier> counted;
  std::deque<std::function<void()>> loads;  // TMA loads and bulk copies in flight
  std::vector<int> copying;                 // threads with copies in flight
  std::vector<int> unfenced;                // threads with writes that no fence has covered

  // -------------------------------------------------------------------------------------------------- scheduling
  uint64_t random_state = 0;
  uint32_t random(size_t below) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((random_state >> 33) % below);
  }

  std::deque<int> ready;
  std::array<int, kMostThreads / kGroup> rank;  // rank of each warpgroup; in crossed mode, the highest goes first
  ucontext_t caller;
  void* caller_seen = nullptr;

  int next() {
    while (ready.empty())
      if (!land()) return kNobody;
    auto const lower = [this](int a, int b) { return rank[a / kGroup] < rank[b / kGroup]; };
    if (mode == kCrossed) std::iter_swap(ready.begin(), std::max_element(ready.begin(), ready.end(), lower));
    else if (seed != 0) std::swap(ready.front(), ready[random(ready.size())]);
    int const thread = ready.front();
    ready.pop_front();
    return thread;
  }
  void resume(int thread) {
    int const from = current;
    if (thread == from) return;
    current = thread;
    watch::become(thread == kNobody ? caller_seen : fibers[thread].seen);
    swapcontext(from == kNobody ? &caller : &fibers[from].context,
                thread == kNobody ? &caller : &fibers[thread].context);
  }
  void wait(Line& line, Reason reason) {
    fibers[current].waits_for = reason;
    line.push_back(current);
    resume(next());
    fibers[current].waits_for = {};
  }
  void wake(Line& line) {
    for (int thread : line) ready.push_back(thread);
    line.clear();
  }
  bool copies_at_once() const { return mode != kLate; }
  bool products_at_once() const { return mode == kEager; }
  // Sometimes lets another thread run. It is called only where the hardware allows any order of threads.
  void stir() {
    if (mode != kCrossed && (seed == 0 || random(8) != 0)) return;
    ready.push_back(current);
    resume(next());
  }
  // Reports an operation that the hardware leaves undefined, and ends the block.
  void fault(char const* what, ...) __attribute__((format(printf, 2, 3))) {
    char text[400];
    va_list rest;
    va_start(rest, what);
    vsnprintf(text, sizeof text, what, rest);
    va_end(rest);
    char where[80];
    snprintf(where, sizeof where, "block %d, thread %d: ", block, current);
    report = std::string(where) + text;
    failed = true;
    resume(kNobody);
  }

  // -------------------------------------------------------------------------------------------------- vector clocks
  void join(Clock& into, Clock const& from) const {
    for (int i = 0; i < 2 * threads; ++i) into[i] = std::max(into[i], from[i]);
  }
  uint32_t& copies_of(Clock& clock, int thread) const { return clock[threads + thread]; }
  // Begins a new epoch of the current thread.
  void step(Fiber& self) const { ++self.clock[current], ++copies_of(self.clock, current); }
  void give(Passage& passage) {
    Fiber& self = fibers[current];
    join(passage.given, self.clock);
    step(self);
    watch::release(&passage.tags[passage.turn & 1]);
  }
  // Records that a thread's copies up to an epoch have landed.
  void give_copies(Passage& passage, int thread, uint32_t epoch) const {
    uint32_t& known = copies_of(passage.given, thread);
    known = std::max(known, epoch);
  }
  void take(Passage& passage, unsigned turn) {
    join(fibers[current].clock, passage.taken);
    watch::acquire(&passage.tags[turn & 1]);
    if (watch::kOn) askers[current].run(&passage.tags[turn & 1], &fibers[current].copied, [] {});
  }
  void turn_over(Passage& passage, bool orders_memory = true) {
    if (orders_memory) {
      std::copy_n(passage.given.begin(), 2 * threads, passage.taken.begin());
      std::fill_n(passage.given.begin(), 2 * threads, 0);
    }
    ++passage.turn;
    wake(passage.line);
  }

  // -------------------------------------------------------------------------------------------------- barriers
  void arrive(int id, int count) {
    if (id < 0 || id >= int(named.size())) fault("expected a barrier of 0 to 15, got %d", id);
    NamedBarrier& barrier = named[id];
    if (count % kWarp != 0 || count > threads) fault("expected whole warps at barrier %d, got %d", id, count);
    if (barrier.count > 0 && barrier.of != count)
      fault("expected %d threads at barrier %d as before, got %d", barrier.of, id, count);
    barrier.of = count;
    give(barrier);
    if (++barrier.count < count) return;
    barrier.count = 0;
    turn_over(barrier);
  }
  void sync(int id, int count) {
    unsigned const turn = named.at(id & 15).turn;
    arrive(id, count);
    while (named[id].turn == turn) wait(named[id].line, {"barrier %ld of %ld threads", id, count});
    take(named[id], turn);
  }
  // Waits until all lanes of the warp have arrived at one instruction, which `what` identifies. Returns the phase's
  // number.
  template <class Last>
  unsigned meet(bool orders_memory, char const* what, Last last) {
    Warp& warp = warps[current / kWarp];
    if (warp.count > 0 && strcmp(warp.at, what) != 0) fault("expected the warp to stay together, got another instruction");
    warp.at = what;
    unsigned const turn = warp.turn;
    if (orders_memory) give(warp);
    if (++warp.count == kWarp) {
      warp.count = 0;
      last();
      turn_over(warp, orders_memory);
    }
    while (warp.turn == turn) wait(warp.line, {what, current / kWarp, 0});
    if (orders_memory) take(warp, turn);
    return turn;
  }

  void make(CountedBarrier& bar, int arrivals) {
    bar.of = bar.pending = arrivals;
    bar.made_by = current;
    bar.made_at = fibers[current].clock[current];
  }
  void check_known(CountedBarrier const& bar) {
    bool const known = fibers[current].clock[bar.made_by] >= bar.made_at;
    if (!known) fault("expected the mbarrier's making to be known, got none that orders it before");
  }
  void complete(CountedBarrier& bar, int arrivals, int64_t bytes) {
    bar.pending -= arrivals;
    bar.bytes -= bytes;
    if (bar.pending < 0) fault("expected %d arrivals in a phase of an mbarrier, got more", bar.of);
    if (bar.pending > 0 || bar.bytes != 0) return;
    bar.pending = bar.of;
    turn_over(bar);
  }
  void wait_for(CountedBarrier& bar, uint32_t parity, long offset) {
    check_known(bar);
    while ((bar.turn & 1) == parity)
      wait(bar.line, {"the mbarrier at byte %ld to end a phase of parity %ld", offset, long(parity)});
    take(bar, parity);
  }

  // -------------------------------------------------------------------------------------------------- both proxies' memory
  bool is_shared(void const* pointer, size_t size) const {
    auto const* const byte = static_cast<unsigned char const*>(pointer);
    return byte >= shared && byte + size <= shared + shared_bytes;
  }
  // Writes to the generic proxy's memory, and records the write until the async proxy sees it too.
  void write(std::vector<Write>& list, int thread, uint32_t offset, uint32_t epoch, void const* bytes, uint32_t size) {
    Write record{offset, epoch, size, {}};
    memcpy(record.bytes, bytes, size);
    if (fibers[thread].stored.empty() && fibers[thread].landed.empty()) unfenced.push_back(thread);
    list.push_back(record);
    memcpy(shared + offset, record.bytes, size);
    watch::writes(shared + offset, size);
    watch::writes(shared + apart + offset, size);  // for the sanitizer, this thread writes now, not the one that fences
  }
  void flush(std::vector<Write>& list, uint32_t known) {
    size_t covered = 0;
    for (; covered < list.size() && list[covered].epoch <= known; ++covered)
      memcpy(shared + apart + list[covered].offset, list[covered].bytes, list[covered].size);
    list.erase(list.begin(), list.begin() + covered);
  }
  // Whether a write that no fence has covered overlaps these bytes. On the hardware it might land after a write by the
  // async proxy.
  bool is_unfenced(uint32_t offset, uint32_t size) const {
    auto const meets = [&](Write const& write) {
      return write.offset < offset + size && offset < write.offset + write.size;
    };
    for (int thread : unfenced)
      for (auto const* list : {&fibers[thread].stored, &fibers[thread].landed})
        if (std::any_of(list->begin(), list->end(), meets)) return true;
    return false;
  }
  void fence() {
    size_t kept = 0;
    for (int thread : unfenced) {
      Fiber& writer = fibers[thread];
      flush(writer.stored, fibers[current].clock[thread]);
      flush(writer.landed, copies_of(fibers[current].clock, thread));
      if (!writer.stored.empty() || !writer.landed.empty()) unfenced[kept++] = thread;
    }
    unfenced.resize(kept);
  }

  // -------------------------------------------------------------------------------------------------- in flight
  void begin(Copy const& copy) {
    Fiber& self = fibers[current];
    if (self.copies.empty()) copying.push_back(current);
    self.copies.push_back(copy);
  }
  void land(int thread, Copy const& copy) {
    static constexpr unsigned char kZeros[16] = {};
    unsigned char bytes[16];
    if (copy.source != nullptr) memcpy(bytes, copy.source, sizeof bytes);
    write(fibers[thread].landed, thread, copy.offset, copy.epoch, copy.source ? bytes : kZeros, 16);
  }
  // Completes one operation that is in flight: a load of `loads`, or a thread's copies up to its next arrival. Returns
  // false if none is in flight.
  bool land() {
    size_t const in_flight = loads.size() + copying.size();
    if (in_flight == 0) return false;
    size_t const index = seed == 0 ? 0 : random(in_flight);
    if (index < loads.size()) {
      std::swap(loads.front(), loads[index]);
      auto const load = std::move(loads.front());
      loads.pop_front();
      load();
      return true;
    }
    std::swap(copying[index - loads.size()], copying.back());
    int const thread = copying.back();
    Fiber& fiber = fibers[thread];
    CountedBarrier* bar = nullptr;
    char nowhere;
    while (!fiber.copies.empty() && bar == nullptr) {
      Copy const copy = fiber.copies.front();
      fiber.copies.pop_front();
      bar = copy.bar;
      void* const end = bar ? &bar->tags[bar->turn & 1] : &nowhere;
      copiers[thread].run(&fiber.copied, end, [&] {
        watch::Unseen unseen;
        if (bar == nullptr) land(thread, copy);
      });
      if (bar != nullptr) give_copies(*bar, thread, copy.epoch);
    }
    if (fiber.copies.empty()) copying.pop_back();
    if (bar != nullptr) complete(*bar, 1, 0);
    return true;
  }

  // -------------------------------------------------------------------------------------------------- a launch
  void (*body)(void const* params, void* shared) = nullptr;
  void const* params = nullptr;
  bool dependent = false;  // whether the grid may begin before the previous grid has ended
  char started, ended;  // tags for the sanitizer
  unsigned char* stacks = nullptr;
  std::vector<unsigned char> memory;
  std::vector<watch::Thread> sanitized;
  // Each thread has a copier, each warp a multiplier and each mbarrier a loader. A thread's asker passes on to the
  // copier what the thread has learnt from barriers. It does not pass on the thread's own writes, because copies are
  // not ordered after them.
  std::deque<watch::Engine> copiers, multipliers, loaders, askers;
  std::mutex busy;

  static void enter();

  void prepare(int count, size_t bytes) {
    if (stacks == nullptr) {
      void* const mapping = mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      stacks = static_cast<unsigned char*>(mapping);
      for (int i = 0; i < kMostThreads; ++i) mprotect(stacks + i * kStack, kPage, PROT_NONE);
    }
    while (sanitized.size() < size_t(count)) sanitized.emplace_back();
    copiers.resize(std::max(copiers.size(), size_t(count)));
    askers.resize(copiers.size());
    multipliers.resize(std::max(multipliers.size(), size_t(count)));
    threads = count;
    shared_bytes = bytes;
    apart = (bytes + kSwizzle - 1) / kSwizzle * kSwizzle;
    memory.resize(2 * apart + kSwizzle);
    auto const start = reinterpret_cast<uintptr_t>(memory.data());
    shared = memory.data() + (kSwizzle - start % kSwizzle) % kSwizzle;
  }
  // Resets threads, memory and barriers to the state at the start of a block. All memory is then NaN.
  void reset() {
    memset(shared, 0xff, 2 * apart);
    fibers.clear();
    fibers.resize(threads);
    warps.clear();
    warps.resize(threads / kWarp);
    named = {};
    counted.clear();
    loads.clear();
    copying.clear();
    unfenced.clear();
    ready.clear();
    for_registers.clear();
    done = 0;
    failed = false;
    free_registers = 0;
    for (int i = 0; i < int(rank.size()); ++i) {
      rank[i] = i;
      std::swap(rank[i], rank[seed == 0 ? i : random(i + 1)]);
    }
    int const registers = std::min(kRegisters / threads, kMostRegisters) / 8 * 8;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      fiber.seen = sanitized[i].who;
      fiber.clock.fill(0);
      fiber.clock[i] = copies_of(fiber.clock, i) = 1;
      fiber.registers = registers;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks + i * kStack + kPage;
      fiber.context.uc_stack.ss_size = kStack - kPage;
      makecontext(&fiber.context, enter, 0);
      ready.push_back(i);
    }
  }
  std::string who_waits() const {
    std::map<std::string, int> waiting;
    for (Fiber const& fiber : fibers) {
      char text[160];
      if (fiber.waits_for.what == nullptr) continue;
      snprintf(text, sizeof text, fiber.waits_for.what, fiber.waits_for.first, fiber.waits_for.second);
      ++waiting[text];
    }
    std::string text = "block " + std::to_string(block) + ": every thread waits";
    for (auto const& [what, count] : waiting) text += "; " + std::to_string(count) + " for " + what;
    return text;
  }
  // Abandons fibers that stopped in the middle of their work.
  void abandon() {
    for (Fiber const& fiber : fibers) {
      watch::become(fiber.seen);
      watch::release(&ended);
    }
    watch::become(caller_seen);
    sanitized.clear();
  }
  // Runs a grid. Returns whether every block ran to its end.
  bool run(int64_t grid) {
    watch::Unseen unseen;
    caller_seen = watch::self();
    report.clear();
    for (block = int(std::max<int64_t>(grid - most_blocks, 0)); block < grid; ++block) {
      reset();
      watch::release(&started);
      resume(next());
      if (!failed && done < threads) report = who_waits();
      bool const whole = !failed && done == threads;
      if (!whole) abandon();
      while (whole && land()) {}
      watch::acquire(&ended);
      if (!whole) return false;
    }
    return true;
  }
};

inline Machine machine;

// Runs a thread from its start to its end. The thread then stays hidden from the sanitizer, because nothing resumes it.
inline void Machine::enter() {
  watch::hide();
  watch::Thread& self = machine.sanitized[machine.current];
  if (self.hidden) watch::show();
  self.hidden = true;
  watch::acquire(&machine.started);
  watch::show();
  machine.body(machine.params, machine.shared);
  watch::hide();
  // If a thread did not wait, the grid could end before the previous grid, and a later grid could begin.
  if (machine.dependent && !machine.fibers[machine.current].waited)
    machine.fault("expected every thread to wait for the grid before");
  watch::release(&machine.ended);
  ++machine.done;
  machine.resume(machine.next());
}

}  // namespace emu
