// Second pass of the row scan: one SIMD group a row puts the parts of its splits together. With
// AGREE, the one threadgroup there is then also counts how many draft tokens the rows confirm.
//
// Template:  T the logits' type; TOP whether there are lists to merge; LISTS how many of them a
//            lane has, ceil(splits / 32); AGREE whether to compare with a draft.
// Inputs:    part_key, part_index, part_sum, part_nan_count [rows, splits];
//            list_key, list_index [rows, splits, top_k];
//            draft [rows] int, the token guessed to follow each row, negative where there is none;
//            first_row [1], where the block starts; dims = {rows, vocab, splits, top_k}.
// Outputs:   argmax, maximum, logsumexp, nan_count [rows]; top_value, top_index [rows, top_k]
//            (untouched without TOP); agreement [4] (untouched without AGREE) = {draft tokens
//            confirmed, next token, NaNs in the rows used, first row used that holds no number or
//            `rows`}.
// Grid:      threads a multiple of 32, at most 256; with AGREE one threadgroup.
using namespace mlxspec;

constexpr uint MAX_AGREE_ROWS = 256;

threadgroup uint chosen[AGREE ? MAX_AGREE_ROWS : 1];
threadgroup uint missing[AGREE ? MAX_AGREE_ROWS : 1];

const uint rows = dims[0];
const uint vocab = dims[1];
const uint splits = dims[2];
const uint top_k = dims[3];

const uint lane = thread_index_in_simdgroup;
const uint simd_groups = simdgroups_per_threadgroup;
const uint first = threadgroup_position_in_grid.x * simd_groups + simdgroup_index_in_threadgroup;
const uint stride = threadgroups_per_grid.x * simd_groups;

for (uint row = first; row < rows; row += stride) {
  RowPart part = empty_part();
  for (uint split = lane; split < splits; split += SIMD_SIZE) {
    const size_t at = size_t(row) * splits + split;
    RowPart other;
    other.key = part_key[at];
    other.index = part_index[at];
    other.sum = part_sum[at];
    other.nan_count = part_nan_count[at];
    part = merge<T>(part, other);
  }
  part = merge_simd_group<T>(part);
  if (lane == 0) {
    const float highest = value_of<T>(part.key);
    const bool infinite = part.key <= -Infinity<T>::bits || part.key >= Infinity<T>::bits;
    argmax[row] = part.index;
    maximum[row] = highest;
    logsumexp[row] = infinite ? highest : highest + metal::precise::log(part.sum);
    nan_count[row] = part.nan_count;
    if (AGREE) {
      chosen[row] = part.index;
      missing[row] = part.nan_count;
    }
  }

  if (TOP) {
    uint heads[LISTS];
    for (uint i = 0; i < LISTS; i++) {
      heads[i] = 0;
    }
    for (uint rank = 0; rank < top_k; rank++) {
      Candidate own = make_candidate(ABSENT, 0);
      uint own_list = 0;
      for (uint i = 0; i < LISTS; i++) {
        const uint split = i * SIMD_SIZE + lane;
        if (split < splits && heads[i] < top_k) {
          const size_t at = (size_t(row) * splits + split) * top_k + heads[i];
          const int key = list_key[at];
          const uint index = list_index[at];
          if (comes_first(key, index, own.key, own.index)) {
            own = make_candidate(key, index);
            own_list = i;
          }
        }
      }
      const Candidate best = best_of_simd_group(own);
      if (lane == 0) {
        top_value[size_t(row) * top_k + rank] = value_of<T>(best.key);
        top_index[size_t(row) * top_k + rank] = best.index;
      }
      const bool taken = own.key != ABSENT && own.index == best.index;
      for (uint i = 0; i < LISTS; i++) {
        heads[i] += taken && i == own_list ? 1 : 0;
      }
    }
  }
}

if (AGREE) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index_in_threadgroup == 0) {
    uint row = first_row[0];
    uint nans = missing[row];
    uint empty_row = missing[row] == vocab ? row : rows;
    while (row + 1 < rows && draft[row] == int(chosen[row])) {
      row++;
      nans += missing[row];
      empty_row = empty_row == rows && missing[row] == vocab ? row : empty_row;
    }
    agreement[0] = row - first_row[0];
    agreement[1] = chosen[row];
    agreement[2] = nans;
    agreement[3] = empty_row;
  }
}
