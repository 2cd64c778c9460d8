// What attention on CPU is asked, how it is cut, and the memory of one thread for it.

#pragma once

#include <limits>

#include "memory.hpp"
#include "vectors.hpp"

constexpr int kChunk = 256;  // keys scored at once
constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Args {
  const void *q, *k, *v;            // [t, H, D] and [t, G, D], strided
  void* out;                        // [t, H, D], contiguous
  void *k_pages, *v_pages;          // [N, B, G, D]
  const int32_t *query_start, *kv_len, *block_ids;
  const int64_t* slots;             // null: K and V are stored already
  int64_t q_strides[2], k_strides[2], v_strides[2];  // of token and head, in elements
  int64_t num_tokens, num_seqs, blocks_per_seq;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  int32_t activation_dtype, cache_dtype;
  int32_t window, tiled, num_threads;  // window 0: none; tiled: for matrix units
  float score_scale, value_scale, softcap;  // softcap 0: none
};

struct Item {
  int32_t seq, kv_head;
  int32_t first_token, num_tokens;  // queries, counted within the sequence
  int32_t first_key, end_key;
  int32_t partial;                  // where an unfinished result goes; -1: finish here
};

struct Split {  // a decode whose spans must be put together
  int32_t seq, kv_head, first_partial, num_partials;
};

inline size_t size_of(int32_t dtype) { return dtype == kFloat32 ? 4 : dtype == kFloat8 ? 1 : 2; }

inline void widen(const void* from, int32_t dtype, int n, float* to) {
  if (dtype == kFloat32) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (dtype == kBFloat16) {
    for (int i = 0; i < n; ++i) to[i] = to_float(static_cast<const BFloat16*>(from)[i]);
  } else {
    for (int i = 0; i < n; ++i) to[i] = to_float(static_cast<const Float16*>(from)[i]);
  }
}

// `to` <- `from` * factor, rounded to nearest even.
inline void narrow(const float* from, float factor, int32_t dtype, int n, void* to) {
  if (dtype == kFloat32) {
    for (int i = 0; i < n; ++i) static_cast<float*>(to)[i] = from[i] * factor;
  } else if (dtype == kBFloat16) {
    for (int i = 0; i < n; ++i) static_cast<BFloat16*>(to)[i] = to_bfloat16(from[i] * factor);
  } else {
    for (int i = 0; i < n; ++i) static_cast<_Float16*>(to)[i] = _Float16(from[i] * factor);
  }
}

inline int whole(int n, int unit) { return (n + unit - 1) / unit * unit; }

// What one thread needs for one item. D is the head dimension padded to two whole vectors.
struct Workspace {
  int D, rows = 0;
  float *q, *scores, *out, *best, *sum, *keys, *values;
  int64_t offset[kChunk];

  void size_for(int head_dim, int num_rows) {
    D = whole(head_dim, 2 * kLanes);
    rows = num_rows;
    q = q_.of(int64_t(rows) * D, 0);
    out = out_.of(int64_t(rows) * D, 0);
    scores = scores_.of(int64_t(rows) * kChunk);
    best = best_.of(rows, kNever);
    sum = sum_.of(rows, 0);
  }

  void size_for_chunk() {
    keys = keys_.of(int64_t(D) * kChunk, 0);
    values = values_.of(int64_t(kChunk) * D, 0);
  }

 private:
  Memory<float> q_, scores_, out_, best_, sum_, keys_, values_;
};
