// A stand-in for the part of metal_stdlib and of a GPU that the project's kernels use: it runs a
// whole grid on one CPU thread and finds the mistakes a GPU would not report.
//
// Threads are fibres. A SIMD group of 32 goes from one meeting point (shuffle, barrier) to the
// next before anything is exchanged; SIMD groups and lanes take turns in an order chosen by a
// seed. Sources: Metal Shading Language Specification 3.2, sections 2.1 and 2.2 (types and
// conversions), 4 (address spaces), 6.5 (maths), 6.9.1 (threadgroup barrier), 6.9.2 (SIMD-group
// functions); for what MLX generates around a body, mlx/backend/common/metal_kernel.cpp.
//
// Faults found: access out of bounds; reading what was never written (device or threadgroup
// memory); writing an output twice; two threads touching one threadgroup element between two
// barriers, one of them writing; a barrier that not all threads reach, or not at the same line; a
// shuffle that reads a lane which is not there; more threads or threadgroup memory than Metal
// grants; a kernel that does not end.
#ifndef MLXSPEC_METAL_STAND_IN
#define MLXSPEC_METAL_STAND_IN

#include <csetjmp>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include <ucontext.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

typedef uint32_t uint;
typedef uint16_t ushort;
typedef uint8_t uchar;

struct uint3 {
  uint x, y, z;
};

namespace stand_in {

constexpr uint SIMD_SIZE = 32;
constexpr uint MAX_THREADS_PER_THREADGROUP = 1024;
constexpr size_t MAX_THREADGROUP_BYTES = 32768;
constexpr size_t STACK_BYTES = 64 * 1024;

// ---- what the driver hands over; mirrored in stand_in.py -------------------------------------

struct Buffer {
  void* data;
  uint64_t count;
  uint32_t* reads;  // per element, how often a thread read it
  uint8_t* written; // per element, whether it holds something
};

struct Launch {
  const Buffer* buffers;
  uint32_t grid[3];
  uint32_t group[3];
  uint32_t order_seed;
  uint32_t flush_denormals;
  uint64_t step_limit;
  char* message; // first fault found, or empty
  uint64_t message_bytes;
  uint64_t barriers; // set by the run: barriers passed, over all threadgroups
  uint64_t shuffles; // set by the run: shuffles carried out, over all SIMD groups
  uint64_t threadgroup_bytes; // set by the run
};

// What a thread knows of its place; the names are those of the attributes.
struct Thread {
  uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  uint3 threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  uint3 dispatch_threads_per_threadgroup;
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
};

typedef void (*Body)(const Launch&, const Thread&);

// ---- fibres ----------------------------------------------------------------------------------

enum class At { runnable, shuffle, barrier, done };

struct Fibre {
  Thread place;
  At at;
  int line;
  uint64_t posted;    // what this lane offers to a shuffle, then what it received
  uint source_lane;
  bool started;
  jmp_buf resume;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

struct SharedBase {
  virtual void forget() = 0;
  virtual ~SharedBase() {}
};

struct Machine {
  const Launch* launch = nullptr;
  Body body = nullptr;
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<SharedBase*> shared;
  Fibre* current = nullptr;
  jmp_buf scheduler;
  ucontext_t main_context;
  uint64_t epoch = 0; // barriers passed in this threadgroup
  uint64_t steps = 0;
  uint64_t barriers = 0, shuffles = 0;
  size_t shared_bytes = 0;
  bool faulty = false, hopeless = false;
};

inline Machine& machine() {
  static Machine the_machine;
  return the_machine;
}

__attribute__((format(printf, 1, 2))) inline void fault(const char* format, ...) {
  Machine& m = machine();
  if (m.faulty) {
    return;
  }
  m.faulty = true;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(m.launch->message, m.launch->message_bytes, format, arguments);
  va_end(arguments);
}

// ucontext makes a fibre; _setjmp and _longjmp, which save no signal mask, switch it from then on.
__attribute__((noinline)) inline void back_to_scheduler() {
  Machine& m = machine();
  if (_setjmp(m.current->resume) == 0) {
    _longjmp(m.scheduler, 1);
  }
}

inline void fibre_main() {
  for (;;) {
    Machine& m = machine();
    m.body(*m.launch, m.current->place);
    m.current->at = At::done;
    back_to_scheduler();
  }
}

__attribute__((noinline)) inline void switch_to(Fibre& fibre) {
  Machine& m = machine();
  m.current = &fibre;
  if (_setjmp(m.scheduler) != 0) {
    return;
  }
  if (fibre.started) {
    _longjmp(fibre.resume, 1);
  }
  fibre.started = true;
  getcontext(&fibre.context);
  if (!fibre.stack) {
    fibre.stack.reset(new char[STACK_BYTES]);
  }
  fibre.context.uc_stack.ss_sp = fibre.stack.get();
  fibre.context.uc_stack.ss_size = STACK_BYTES;
  fibre.context.uc_link = nullptr;
  makecontext(&fibre.context, fibre_main, 0);
  swapcontext(&m.main_context, &fibre.context);
}

// Every access and every meeting counts as a step; a kernel caught in a loop runs out of them.
inline void count_step() {
  Machine& m = machine();
  if (++m.steps > m.launch->step_limit) {
    fault("the kernel does not end: %llu steps", (unsigned long long)m.steps);
    m.hopeless = true;
    back_to_scheduler();
  }
}

inline void meet(At at, int line) {
  Machine& m = machine();
  count_step();
  m.current->at = at;
  m.current->line = line;
  back_to_scheduler();
}

// ---- memory ----------------------------------------------------------------------------------

template <typename T>
inline T poison() {
  T value;
  memset(static_cast<void*>(&value), 0xa5, sizeof(T));
  return value;
}

enum class Space { device_memory, constant_memory };

// A read-only buffer. The space is part of the type, as it is in Metal: what takes a pointer to
// device memory does not take one to constant memory.
template <typename T, Space S>
struct Input {
  const Buffer* buffer;
  const char* name;

  T operator[](uint64_t i) const {
    count_step();
    if (i >= buffer->count) {
      fault("%s[%llu] read, it has %llu elements", name, (unsigned long long)i,
            (unsigned long long)buffer->count);
      return poison<T>();
    }
    if (!buffer->written[i]) {
      fault("%s[%llu] read, but nobody wrote it", name, (unsigned long long)i);
      return poison<T>();
    }
    buffer->reads[i]++;
    return static_cast<const T*>(buffer->data)[i];
  }
};

template <typename T>
struct Output {
  const Buffer* buffer;
  const char* name;

  struct Element {
    const Output& output;
    uint64_t i;

    void operator=(T value) const {
      count_step();
      const Buffer& b = *output.buffer;
      if (i >= b.count) {
        fault("%s[%llu] written, it has %llu elements", output.name, (unsigned long long)i,
              (unsigned long long)b.count);
        return;
      }
      if (b.written[i]) {
        fault("%s[%llu] written twice", output.name, (unsigned long long)i);
        return;
      }
      b.written[i] = 1;
      static_cast<T*>(b.data)[i] = value;
    }
  };

  Element operator[](uint64_t i) const { return Element{*this, i}; }
};

template <typename T, size_t N>
struct Shared : SharedBase {
  struct Slot {
    T value;
    bool written;
    int64_t write_epoch, read_epoch; // -1: never
    uint writer, reader;
    bool many_readers;
  };
  Slot slots[N];
  const char* name;

  explicit Shared(const char* name_) : name(name_) {
    machine().shared.push_back(this);
    machine().shared_bytes += N * sizeof(T);
    forget();
  }

  void forget() override {
    for (Slot& slot : slots) {
      slot = Slot{poison<T>(), false, -1, -1, 0, 0, false};
    }
  }

  struct Element {
    Shared& shared;
    uint64_t i;

    Slot* slot(const char* verb) const {
      count_step();
      if (i >= N) {
        fault("threadgroup %s[%llu] %s, it has %llu elements", shared.name, (unsigned long long)i,
              verb, (unsigned long long)N);
        return nullptr;
      }
      return &shared.slots[i];
    }

    operator T() const {
      Slot* s = slot("read");
      if (!s) {
        return poison<T>();
      }
      const Machine& m = machine();
      const uint self = m.current->place.thread_index_in_threadgroup;
      const int64_t now = int64_t(m.epoch);
      if (!s->written) {
        fault("threadgroup %s[%llu] read, but nobody wrote it", shared.name,
              (unsigned long long)i);
      } else if (s->write_epoch == now && s->writer != self) {
        fault("threadgroup %s[%llu]: thread %u reads what thread %u wrote, no barrier between",
              shared.name, (unsigned long long)i, self, s->writer);
      }
      s->many_readers = s->read_epoch == now && (s->many_readers || s->reader != self);
      s->read_epoch = now;
      s->reader = self;
      return s->value;
    }

    void operator=(T value) const {
      Slot* s = slot("written");
      if (!s) {
        return;
      }
      const Machine& m = machine();
      const uint self = m.current->place.thread_index_in_threadgroup;
      const int64_t now = int64_t(m.epoch);
      if (s->write_epoch == now && s->writer != self) {
        fault("threadgroup %s[%llu]: threads %u and %u write it, no barrier between", shared.name,
              (unsigned long long)i, s->writer, self);
      } else if (s->read_epoch == now && (s->many_readers || s->reader != self)) {
        fault("threadgroup %s[%llu]: thread %u overwrites what another just read, no barrier "
              "between", shared.name, (unsigned long long)i, self);
      }
      s->written = true;
      s->write_epoch = now;
      s->writer = self;
      s->value = value;
    }
  };

  Element operator[](uint64_t i) { return Element{*this, i}; }
};

// ---- the grid --------------------------------------------------------------------------------

struct Order {
  uint64_t state;
  // A permutation of 0 .. n - 1: forward for seed 0, backward for seed 1, else shuffled.
  std::vector<uint> of(uint n, uint seed) {
    std::vector<uint> order(n);
    for (uint i = 0; i < n; i++) {
      order[i] = seed == 1 ? n - 1 - i : i;
    }
    for (uint i = n; seed > 1 && i > 1; i--) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(order[i - 1], order[(state >> 33) % i]);
    }
    return order;
  }
};

// Lets the lanes of one SIMD group run until each waits at a barrier or is done.
inline void run_simd_group(Machine& m, uint first, uint count, const std::vector<uint>& lanes) {
  for (;;) {
    for (uint lane : lanes) {
      if (lane < count && m.fibres[first + lane]->at == At::runnable) {
        switch_to(*m.fibres[first + lane]);
        if (m.hopeless) {
          return;
        }
      }
    }
    // Diverged lanes: those at the earliest line go on, as a compiler's reconvergence would have it.
    int line = std::numeric_limits<int>::max();
    for (uint lane = 0; lane < count; lane++) {
      const Fibre& fibre = *m.fibres[first + lane];
      if (fibre.at == At::shuffle && fibre.line < line) {
        line = fibre.line;
      }
    }
    if (line == std::numeric_limits<int>::max()) {
      return;
    }
    m.shuffles++;
    uint64_t received[SIMD_SIZE];
    bool active[SIMD_SIZE] = {};
    for (uint lane = 0; lane < count; lane++) {
      const Fibre& fibre = *m.fibres[first + lane];
      active[lane] = fibre.at == At::shuffle && fibre.line == line;
    }
    for (uint lane = 0; lane < count; lane++) {
      if (active[lane]) {
        const uint source = m.fibres[first + lane]->source_lane;
        if (source >= count || !active[source]) {
          fault("line %d: a shuffle reads lane %u, which is not active", line, source);
          received[lane] = 0xa5a5a5a5a5a5a5a5ull;
        } else {
          received[lane] = m.fibres[first + source]->posted;
        }
      }
    }
    for (uint lane = 0; lane < count; lane++) {
      if (active[lane]) {
        m.fibres[first + lane]->posted = received[lane];
        m.fibres[first + lane]->at = At::runnable;
      }
    }
  }
}

inline void run_threadgroup(Machine& m, uint threads, Order& order) {
  m.epoch = 0;
  for (SharedBase* shared : m.shared) {
    shared->forget();
  }
  const uint groups = (threads + SIMD_SIZE - 1) / SIMD_SIZE;
  for (;;) {
    for (uint group : order.of(groups, m.launch->order_seed)) {
      const uint first = group * SIMD_SIZE;
      const uint count = threads - first < SIMD_SIZE ? threads - first : SIMD_SIZE;
      run_simd_group(m, first, count, order.of(SIMD_SIZE, m.launch->order_seed));
      if (m.hopeless) {
        return;
      }
    }
    uint waiting = 0;
    int line = 0;
    bool same_line = true;
    for (uint i = 0; i < threads; i++) {
      const Fibre& fibre = *m.fibres[i];
      if (fibre.at == At::barrier) {
        same_line = same_line && (waiting == 0 || fibre.line == line);
        line = fibre.line;
        waiting++;
      }
    }
    if (waiting == 0) {
      return;
    }
    if (waiting < threads || !same_line) {
      fault("divergent barrier at line %d: %u of %u threads reach it%s", line, waiting, threads,
            same_line ? "" : ", at different lines");
      m.hopeless = true;
      return;
    }
    m.epoch++;
    m.barriers++;
    for (uint i = 0; i < threads; i++) {
      m.fibres[i]->at = At::runnable;
    }
  }
}

// As Metal's dispatchThreads: the grid counts threads, a last threadgroup may be smaller.
inline void run(Launch& launch, Body body) {
  Machine& m = machine();
  m.launch = &launch;
  m.body = body;
  m.steps = m.barriers = m.shuffles = 0;
  m.faulty = m.hopeless = false;
  launch.message[0] = 0;
#if defined(__SSE2__)
  const unsigned saved = _mm_getcsr();
  if (launch.flush_denormals) {
    _mm_setcsr(saved | 0x8040);
  }
#endif
  uint size[3], groups[3];
  for (int d = 0; d < 3; d++) {
    size[d] = launch.group[d] < launch.grid[d] ? launch.group[d] : launch.grid[d];
    groups[d] = size[d] ? (launch.grid[d] + size[d] - 1) / size[d] : 0;
  }
  const uint most = size[0] * size[1] * size[2];
  if (most == 0 || most > MAX_THREADS_PER_THREADGROUP) {
    fault("a threadgroup of %u threads; Metal runs 1 to %u", most, MAX_THREADS_PER_THREADGROUP);
    return;
  }
  while (m.fibres.size() < most) {
    m.fibres.emplace_back(new Fibre());
  }
  Order order{launch.order_seed};
  const uint total = groups[0] * groups[1] * groups[2];
  for (uint position : order.of(total, launch.order_seed)) {
    const uint3 at = {position % groups[0], position / groups[0] % groups[1],
                      position / groups[0] / groups[1]};
    const uint start[3] = {at.x * size[0], at.y * size[1], at.z * size[2]};
    uint here[3];
    for (int d = 0; d < 3; d++) {
      here[d] = launch.grid[d] - start[d] < size[d] ? launch.grid[d] - start[d] : size[d];
    }
    const uint threads = here[0] * here[1] * here[2];
    for (uint i = 0; i < threads; i++) {
      Fibre& fibre = *m.fibres[i];
      const uint3 local = {i % here[0], i / here[0] % here[1], i / here[0] / here[1]};
      Thread& t = fibre.place;
      t.thread_position_in_threadgroup = local;
      t.thread_position_in_grid = {start[0] + local.x, start[1] + local.y, start[2] + local.z};
      t.threadgroup_position_in_grid = at;
      t.threads_per_threadgroup = {here[0], here[1], here[2]};
      t.dispatch_threads_per_threadgroup = {size[0], size[1], size[2]};
      t.threadgroups_per_grid = {groups[0], groups[1], groups[2]};
      t.threads_per_grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
      t.thread_index_in_threadgroup = i;
      t.thread_index_in_simdgroup = i % SIMD_SIZE;
      t.simdgroup_index_in_threadgroup = i / SIMD_SIZE;
      t.simdgroups_per_threadgroup = (threads + SIMD_SIZE - 1) / SIMD_SIZE;
      t.threads_per_simdgroup = t.thread_execution_width = SIMD_SIZE;
      fibre.at = At::runnable;
    }
    run_threadgroup(m, threads, order);
    if (m.hopeless) {
      break;
    }
  }
  // A test process holds many kernels: none of them keeps its stacks.
  m.fibres.clear();
  if (m.shared_bytes > MAX_THREADGROUP_BYTES) {
    fault("%zu bytes of threadgroup memory; Metal grants %zu", m.shared_bytes,
          MAX_THREADGROUP_BYTES);
  }
  launch.barriers = m.barriers;
  launch.shuffles = m.shuffles;
  launch.threadgroup_bytes = m.shared_bytes;
#if defined(__SSE2__)
  _mm_setcsr(saved);
#endif
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Round to nearest, ties to even, in integers: neither the CPU's flushing nor its maths interferes.
inline uint16_t half_bits(float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) {
    return uint16_t(sign | 0x7e00 | ((size >> 13) & 0x1ff));
  }
  if (size >= 0x477ff000) { // 65520, which rounds to what half cannot hold
    return uint16_t(sign | 0x7c00);
  }
  uint32_t mantissa, shift;
  if (size >= 0x38800000) { // 2^-14, the smallest normal half
    mantissa = size - 0x38000000;
    shift = 13;
  } else {
    const uint32_t exponent = size >> 23;
    if (exponent < 102) {
      return uint16_t(sign);
    }
    mantissa = (size & 0x7fffff) | 0x800000;
    shift = 126 - exponent;
  }
  const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1);
  const uint32_t middle = 1u << (shift - 1);
  return uint16_t(sign | (kept + (rest > middle || (rest == middle && (kept & 1)))));
}

inline float half_value(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 31) {
    return float_of(sign | 0x7f800000 | (mantissa << 13));
  }
  if (exponent == 0) {
    const float size = float(mantissa) * (1.0f / 16777216.0f);
    return float_of(bits_of(size) | sign);
  }
  return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline uint16_t bfloat_bits(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return uint16_t((bits >> 16) | 0x40);
  }
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

} // namespace stand_in

// ---- the language ----------------------------------------------------------------------------

// 16-bit floats. Conversions are stricter than Metal's (none to a 16-bit type is implicit), so what
// compiles here does not lean on one. Arithmetic gives the type of its operands, rounded once.
#define STAND_IN_SMALL_FLOAT(NAME, TO_BITS, TO_FLOAT)                                         \
  struct NAME {                                                                               \
    uint16_t bits;                                                                            \
    NAME() = default;                                                                         \
    explicit NAME(float x) : bits(TO_BITS(x)) {}                                              \
    operator float() const { return TO_FLOAT; }                                               \
    friend NAME operator+(NAME a, NAME b) { return NAME(float(a) + float(b)); }               \
    friend NAME operator-(NAME a, NAME b) { return NAME(float(a) - float(b)); }               \
    friend NAME operator*(NAME a, NAME b) { return NAME(float(a) * float(b)); }               \
    friend NAME operator/(NAME a, NAME b) { return NAME(float(a) / float(b)); }               \
  };
STAND_IN_SMALL_FLOAT(half, stand_in::half_bits, stand_in::half_value(bits))
STAND_IN_SMALL_FLOAT(bfloat, stand_in::bfloat_bits, stand_in::float_of(uint32_t(bits) << 16))
#undef STAND_IN_SMALL_FLOAT

typedef half float16_t;
typedef bfloat bfloat16_t;

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}

namespace metal {

namespace precise {
inline float exp(float x) { return std::exp(x); }
inline float log(float x) { return std::log(x); }
inline float tanh(float x) { return std::tanh(x); }
// Computed in float and rounded, as MLX's bf16_math.h does it for bfloat.
inline half tanh(half x) { return half(std::tanh(float(x))); }
inline bfloat tanh(bfloat x) { return bfloat(std::tanh(float(x))); }
} // namespace precise

inline uint min(uint a, uint b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
// Of floats, min is fmin and max is fmax (6.5).
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
// "If one argument is a NaN, the other is returned" (6.5).
inline float fmax(float a, float b) { return std::fmax(a, b); }
inline float fmin(float a, float b) { return std::fmin(a, b); }

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

inline void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  stand_in::meet(stand_in::At::barrier, line);
}

template <typename T>
inline T simd_shuffle(T value, ushort source_lane, int line = __builtin_LINE()) {
  stand_in::Fibre& self = *stand_in::machine().current;
  self.posted = 0;
  memcpy(&self.posted, &value, sizeof(T));
  self.source_lane = source_lane;
  stand_in::meet(stand_in::At::shuffle, line);
  T received;
  memcpy(static_cast<void*>(&received), &self.posted, sizeof(T));
  return received;
}

template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, int line = __builtin_LINE()) {
  const uint lane = stand_in::machine().current->place.thread_index_in_simdgroup;
  return simd_shuffle(value, ushort(lane ^ mask), line);
}

// "data for the upper delta lanes is undefined" (6.9.2): a lane past the end is a fault here.
template <typename T>
inline T simd_shuffle_down(T value, ushort delta, int line = __builtin_LINE()) {
  const uint lane = stand_in::machine().current->place.thread_index_in_simdgroup;
  return simd_shuffle(value, ushort(lane + delta), line);
}

} // namespace metal

using namespace metal;

// Address spaces that need no checks of their own. The driver writes the kernel's parameters and
// its threadgroup arrays with the checked types above.
#define thread
#define constant
#define device

#endif
