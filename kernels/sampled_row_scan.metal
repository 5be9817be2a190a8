// First pass of the sampled choice: argmax of logits / temperature + Gumbel noise, the noise drawn
// where it is added and never stored. The second pass is logit_row_combine's, over float keys.
//
// A thread takes the two halves of a random pair together: index i and index i + ceil(vocab / 2).
//
// Template:  T the logits' type; CAPPED whether a soft cap comes first.
// Inputs:    logits [rows, vocab] T; keys [rows, 2], the seed of each row; cap T; temperature;
//            dims = {vocab, pairs of a split, splits}.
// Outputs:   part_key, part_index, part_sum (zero), part_nan_count [rows, splits].
// Grid:      x = splits * threads, y = rows; threads a multiple of 32, at most 256.
using namespace mlxspec;

threadgroup int group_key[MAX_SIMD_GROUPS];
threadgroup uint group_index[MAX_SIMD_GROUPS];
threadgroup uint group_nan_count[MAX_SIMD_GROUPS];

const uint vocab = dims[0];
const uint pairs = (vocab + 1) / 2;
const uint split_pairs = dims[1];
const uint splits = dims[2];

const uint split = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup;
const uint simd_group = simdgroup_index_in_threadgroup;
const uint simd_groups = simdgroups_per_threadgroup;

const uint begin = min(split * split_pairs, pairs);
const uint end = min(begin + split_pairs, pairs);
const size_t row_start = size_t(row) * vocab;
const uint key0 = keys[2 * row];
const uint key1 = keys[2 * row + 1];

Candidate best = make_candidate(ABSENT, 0);
uint nans = 0;
for (uint i = begin + thread_index_in_threadgroup; i < end; i += threads_per_threadgroup.x) {
  const RandomPair bits = random_pair(key0, key1, i, vocab);
  for (uint second = 0; second < 2; second++) {
    const uint index = second ? i + pairs : i;
    if (index < vocab) {
      T x = logits[row_start + index];
      if (CAPPED) {
        x = soft_capped<T>(x, cap);
      }
      nans += is_nan(x) ? 1 : 0;
      const int key = order_key(float(x) / temperature + gumbel(second ? bits.high : bits.low));
      if (comes_first(key, index, best.key, best.index)) {
        best = make_candidate(key, index);
      }
    }
  }
}

best = best_of_simd_group(best);
for (ushort distance = SIMD_SIZE / 2; distance > 0; distance /= 2) {
  nans += simd_shuffle_xor(nans, distance);
}
if (lane == 0) {
  group_key[simd_group] = best.key;
  group_index[simd_group] = best.index;
  group_nan_count[simd_group] = nans;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_threadgroup == 0) {
  for (uint group = 1; group < simd_groups; group++) {
    const int key = group_key[group];
    const uint index = group_index[group];
    if (comes_first(key, index, best.key, best.index)) {
      best = make_candidate(key, index);
    }
    nans += group_nan_count[group];
  }
  const size_t out = size_t(row) * splits + split;
  part_key[out] = best.key;
  part_index[out] = best.index;
  part_sum[out] = 0.0f;
  part_nan_count[out] = nans;
}
