// First pass of the row scan: one threadgroup reads one split of one row, each logit once, and
// leaves what it knows of it. Threads read four neighbours at a time.
//
// Template:  T the logits' type; CAPPED whether a soft cap comes first; TOP whether to list the
//            largest entries.
// Inputs:    logits [rows, vocab] T; cap T; dims = {vocab, length of a split, splits, top_k}.
// Outputs:   part_key, part_index, part_sum, part_nan_count [rows, splits];
//            list_key, list_index [rows, splits, top_k] (untouched without TOP).
// Grid:      x = splits * threads, y = rows; threads a multiple of 32, at most 256, and a split at
//            most THREAD_LOGITS logits a thread.
using namespace mlxspec;

constexpr uint READ_WIDTH = 4;
constexpr uint READS = 4;
constexpr uint THREAD_LOGITS = READ_WIDTH * READS;

threadgroup int group_key[MAX_SIMD_GROUPS];
threadgroup uint group_index[MAX_SIMD_GROUPS];
threadgroup float group_sum[MAX_SIMD_GROUPS];
threadgroup uint group_nan_count[MAX_SIMD_GROUPS];
// Two turns: a round may write while a slower SIMD group still reads the round before.
threadgroup int turn_key[2 * MAX_SIMD_GROUPS];
threadgroup uint turn_index[2 * MAX_SIMD_GROUPS];

const uint vocab = dims[0];
const uint split_length = dims[1];
const uint splits = dims[2];
const uint top_k = dims[3];

const uint split = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint thread_index = thread_index_in_threadgroup;
const uint threads = threads_per_threadgroup.x;
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const uint simd_groups = simdgroups_per_threadgroup;

const uint begin = min(split * split_length, vocab);
const uint end = min(begin + split_length, vocab);
const size_t row_start = size_t(row) * vocab;

RowPart part = empty_part();
int keys[TOP ? THREAD_LOGITS : 1];

for (uint read = 0; read < READS; read++) {
  const uint start = begin + (read * threads + thread_index) * READ_WIDTH;
  T values[READ_WIDTH];
  if (start + READ_WIDTH <= end) {
    for (uint i = 0; i < READ_WIDTH; i++) {
      values[i] = logits[row_start + start + i];
    }
  } else {
    for (uint i = 0; i < READ_WIDTH; i++) {
      values[i] = start + i < end ? T(logits[row_start + start + i]) : T(0.0f);
    }
  }
  for (uint i = 0; i < READ_WIDTH; i++) {
    const bool present = start + i < end;
    T x = values[i];
    if (CAPPED) {
      x = soft_capped<T>(x, cap);
    }
    if (present) {
      include(part, x, start + i);
    }
    if (TOP) {
      keys[read * READ_WIDTH + i] = present ? order_key(x) : ABSENT;
    }
  }
}

part = merge_simd_group<T>(part);
if (lane == 0) {
  group_key[simd_group] = part.key;
  group_index[simd_group] = part.index;
  group_sum[simd_group] = part.sum;
  group_nan_count[simd_group] = part.nan_count;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simd_group == 0) {
  part = empty_part();
  if (lane < simd_groups) {
    part.key = group_key[lane];
    part.index = group_index[lane];
    part.sum = group_sum[lane];
    part.nan_count = group_nan_count[lane];
  }
  part = merge_simd_group<T>(part);
  if (lane == 0) {
    const size_t out = size_t(row) * splits + split;
    part_key[out] = part.key;
    part_index[out] = part.index;
    part_sum[out] = part.sum;
    part_nan_count[out] = part.nan_count;
  }
}

if (TOP) {
  // Every round takes the best key left in the threadgroup's registers.
  Candidate own = make_candidate(ABSENT, 0);
  bool search = true;
  for (uint rank = 0; rank < top_k; rank++) {
    if (search) {
      own = make_candidate(ABSENT, 0);
      for (uint i = 0; i < THREAD_LOGITS; i++) {
        const uint index =
            begin + ((i / READ_WIDTH) * threads + thread_index) * READ_WIDTH + i % READ_WIDTH;
        if (keys[i] > own.key) {
          own = make_candidate(keys[i], index);
        }
      }
    }
    const Candidate best_here = best_of_simd_group(own);
    const uint turn = (rank % 2) * MAX_SIMD_GROUPS;
    if (lane == 0) {
      turn_key[turn + simd_group] = best_here.key;
      turn_index[turn + simd_group] = best_here.index;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Candidate best = make_candidate(turn_key[turn], turn_index[turn]);
    for (uint group = 1; group < simd_groups; group++) {
      const int key = turn_key[turn + group];
      const uint index = turn_index[turn + group];
      if (comes_first(key, index, best.key, best.index)) {
        best = make_candidate(key, index);
      }
    }
    if (thread_index == 0) {
      const size_t out = (size_t(row) * splits + split) * top_k + rank;
      list_key[out] = best.key;
      list_index[out] = best.index;
    }
    search = own.key != ABSENT && own.index == best.index;
    for (uint i = 0; i < THREAD_LOGITS; i++) {
      const uint index =
          begin + ((i / READ_WIDTH) * threads + thread_index) * READ_WIDTH + i % READ_WIDTH;
      if (search && index == best.index) {
        keys[i] = ABSENT;
      }
    }
  }
}
