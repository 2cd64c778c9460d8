// Paged causal attention on CPU: all new K and V are stored, then every query attends.
//
//   item       one KV head of one sequence, some of its query tokens, some of its keys
//   row        one query head of one query token; the `group` query heads of a KV head are
//              rows side by side, so K and V are read once for all of them
//   chunk      kChunk keys: scores, running maximum and sum, weighted V (the online softmax)
//
// A sequence with one query token (a decode) reads K and V where they lie; its keys are split
// into spans of a fixed size so that few sequences still feed all threads. More query tokens
// (a prefill chunk) are worth widening a chunk of K (transposed) and V to float first. Spans
// and tiles are cut by the sequence alone, so a result does not depend on its batch mates or
// on the number of threads.

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "tiles.hpp"
#include "vectors.hpp"

namespace {

constexpr int kChunk = 128;      // keys scored at once
constexpr int kAhead = 16;       // keys fetched before they are scored
constexpr int kSpan = 512;       // keys of one item of a decode
constexpr int kTileRows = 192;   // rows of one item of a prefill, about
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
  int32_t window, num_threads;      // window 0: none
  int32_t max_queries;              // sequences with more are left to somebody else
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

size_t size_of(int32_t dtype) { return dtype == kFloat32 ? 4 : dtype == kFloat8 ? 1 : 2; }

void widen(const void* from, int32_t dtype, int n, float* to) {
  if (dtype == kFloat32) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (dtype == kBFloat16) {
    for (int i = 0; i < n; ++i) to[i] = to_float(static_cast<const BFloat16*>(from)[i]);
  } else {
    for (int i = 0; i < n; ++i) to[i] = to_float(static_cast<const Float16*>(from)[i]);
  }
}

// `to` <- `from` * factor, rounded to nearest even.
void narrow(const float* from, float factor, int32_t dtype, int n, void* to) {
  if (dtype == kFloat32) {
    for (int i = 0; i < n; ++i) static_cast<float*>(to)[i] = from[i] * factor;
  } else if (dtype == kBFloat16) {
    for (int i = 0; i < n; ++i) static_cast<BFloat16*>(to)[i] = to_bfloat16(from[i] * factor);
  } else {
    for (int i = 0; i < n; ++i) static_cast<_Float16*>(to)[i] = _Float16(from[i] * factor);
  }
}

int whole(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Memory of one thread for one item. D is the head dimension padded to two whole vectors.
struct Workspace {
  int D, rows = 0;
  std::vector<float> q, scores, out, best, sum, keys, values;
  int64_t offset[kChunk];

  void size_for(int head_dim, int num_rows) {
    D = whole(head_dim, 2 * kLanes);
    rows = num_rows;
    q.assign(size_t(rows) * D, 0);
    out.assign(size_t(rows) * D, 0);
    scores.resize(size_t(rows) * kChunk);
    best.assign(rows, kNever);
    sum.assign(rows, 0);
  }
};

template <class T>
class Attention {
 public:
  explicit Attention(const Args& args) : a_(args), group_(args.num_heads / args.num_kv_heads) {}

  void run() {
    plan();
    partials_.resize(size_t(num_partials_) * group_ * (whole(a_.head_dim, 2 * kLanes) + 2));
#pragma omp parallel num_threads(a_.num_threads)
    {
      if (a_.slots) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a_.num_tokens; ++t) store_token(t);
        // The end of the loop is a barrier: nobody reads before all is written.
      }
      static thread_local Workspace w;
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < items_.size(); ++i) attend(items_[i], w);
#pragma omp for schedule(static)
      for (size_t i = 0; i < splits_.size(); ++i) combine(splits_[i]);
    }
  }

 private:
  const Args& a_;
  const int group_;
  std::vector<Item> items_;
  std::vector<Split> splits_;
  std::vector<float> partials_;  // per partial and row: best, sum, out[D]
  int32_t num_partials_ = 0;

  void plan() {
    const int tile = std::max(1, kTileRows / group_);
    for (int s = 0; s < a_.num_seqs; ++s) {
      const int queries = a_.query_start[s + 1] - a_.query_start[s], keys = a_.kv_len[s];
      if (queries > a_.max_queries) continue;
      for (int g = 0; g < a_.num_kv_heads; ++g) {
        if (queries == 1) {
          plan_decode(s, g, keys);
          continue;
        }
        // The last tiles see the most keys; they go first, so that no thread is left with one.
        for (int first = (queries - 1) / tile * tile; first >= 0; first -= tile) {
          const int count = std::min(tile, queries - first), position = keys - queries + first;
          items_.push_back({s, g, first, count, first_seen(position), position + count, -1});
        }
      }
    }
  }

  void plan_decode(int s, int g, int keys) {
    const int first = first_seen(keys - 1) / kSpan, spans = (keys + kSpan - 1) / kSpan;
    const bool whole = spans - first == 1;
    if (!whole) splits_.push_back({s, g, num_partials_, spans - first});
    for (int span = first; span < spans; ++span) {
      const int begin = std::max(span * kSpan, first_seen(keys - 1));
      items_.push_back(
          {s, g, 0, 1, begin, std::min((span + 1) * kSpan, keys), whole ? -1 : num_partials_++});
    }
  }

  int first_seen(int position) const {
    return a_.window ? std::max(0, position - a_.window + 1) : 0;
  }

  void store_token(int64_t t) {
    const size_t size = sizeof(T), bytes = a_.head_dim * size;
    for (int g = 0; g < a_.num_kv_heads; ++g) {
      const int64_t to = ((a_.slots[t] * a_.num_kv_heads) + g) * int64_t(bytes);
      const int64_t k = (t * a_.k_strides[0] + g * a_.k_strides[1]) * int64_t(size);
      const int64_t v = (t * a_.v_strides[0] + g * a_.v_strides[1]) * int64_t(size);
      std::memcpy(static_cast<char*>(a_.k_pages) + to, static_cast<const char*>(a_.k) + k, bytes);
      std::memcpy(static_cast<char*>(a_.v_pages) + to, static_cast<const char*>(a_.v) + v, bytes);
    }
  }

  // Where the keys of a chunk lie, in elements; the last one again up to a whole four.
  void locate(const Item& item, int key, int count, Workspace& w) const {
    const int32_t* block_ids = a_.block_ids + item.seq * a_.blocks_per_seq;
    int block = key / a_.block_size, within = key % a_.block_size;
    const int64_t row = int64_t(a_.num_kv_heads) * a_.head_dim;
    for (int j = 0; j < count; ++j) {
      w.offset[j] = (int64_t(block_ids[block]) * a_.block_size + within) * row +
                    item.kv_head * a_.head_dim;
      if (++within == a_.block_size) within = 0, ++block;
    }
    for (int j = count; j % 4; ++j) w.offset[j] = w.offset[count - 1];
  }

  void attend(const Item& item, Workspace& w) {
    w.size_for(a_.head_dim, item.num_tokens * group_);
    load_queries(item, w);
    const bool direct = item.num_tokens == 1 && a_.head_dim % kLanes == 0;
    if (!direct) {
      w.keys.assign(size_t(w.D) * kChunk, 0);
      w.values.assign(size_t(kChunk) * w.D, 0);
    }
    for (int key = item.first_key; key < item.end_key; key += kChunk) {
      const int count = std::min(kChunk, item.end_key - key);
      locate(item, key, count, w);
      if (direct) {
        for_rows([&](auto rows, int r) { score_rows<rows()>(count, w, r); });
      } else {
        widen_chunk(count, w);
        multiply(w.q.data(), w.D, w.keys.data(), kChunk, w.scores.data(), kChunk, w.rows, w.D,
                 whole(count, 2 * kLanes), false);
      }
      weigh(item, key, count, w);
      if (direct) {
        for_rows([&](auto rows, int r) { add_rows<rows()>(count, w, r); });
      } else {
        multiply(w.scores.data(), kChunk, w.values.data(), w.D, w.out.data(), w.D, w.rows, count,
                 w.D, true);
      }
    }
    finish(item, w);
  }

  void load_queries(const Item& item, Workspace& w) {
    const size_t size = size_of(a_.activation_dtype);
    for (int r = 0; r < w.rows; ++r) {
      const int64_t t = a_.query_start[item.seq] + item.first_token + r / group_;
      const int64_t h = item.kv_head * group_ + r % group_;
      const char* from = static_cast<const char*>(a_.q) +
                         (t * a_.q_strides[0] + h * a_.q_strides[1]) * int64_t(size);
      float* row = &w.q[size_t(r) * w.D];
      widen(from, a_.activation_dtype, a_.head_dim, row);
      for (int d = 0; d < a_.head_dim; ++d) row[d] *= a_.score_scale;
    }
  }

  void widen_chunk(int count, Workspace& w) {
    const T *keys = static_cast<const T*>(a_.k_pages), *values = static_cast<const T*>(a_.v_pages);
    for (int j = 0; j < count; ++j) {
      const T *k = keys + w.offset[j], *v = values + w.offset[j];
      for (int d = 0; d < a_.head_dim; ++d) w.keys[size_t(d) * kChunk + j] = to_float(k[d]);
      for (int d = 0; d < a_.head_dim; ++d) w.values[size_t(j) * w.D + d] = to_float(v[d]);
    }
  }

  // Scores become weights e^(score - best); what was summed before is scaled to the new best.
  void weigh(const Item& item, int key, int count, Workspace& w) {
    const int queries = a_.query_start[item.seq + 1] - a_.query_start[item.seq];
    const int padded = whole(count, kLanes);
    for (int r = 0; r < w.rows; ++r) {
      float* score = &w.scores[size_t(r) * kChunk];
      const int position = a_.kv_len[item.seq] - queries + item.first_token + r / group_;
      const int begin = std::clamp(first_seen(position) - key, 0, count);
      const int end = std::clamp(position + 1 - key, begin, count);
      if (a_.softcap != 0)
        for (int j = 0; j < padded; j += kLanes)
          store(score + j, a_.softcap * tanh_of(load(score + j) / a_.softcap));
      for (int j = 0; j < begin; ++j) score[j] = kNever;
      for (int j = end; j < padded; ++j) score[j] = kNever;
      Floats best = splat(w.best[r]);
      for (int j = 0; j < padded; j += kLanes) best = max(best, load(score + j));
      const float top = max_of(best);
      if (top == kNever) {  // nothing seen yet, as before a window's begin
        std::fill(score, score + padded, 0.0f);
        continue;
      }
      const float faded = exp_of(splat(w.best[r] - top))[0];
      Floats sum{};
      for (int j = 0; j < padded; j += kLanes) {
        const Floats weight = exp_of(load(score + j) - top);
        store(score + j, weight);
        sum += weight;
      }
      w.sum[r] = w.sum[r] * faded + sum_of(sum);
      w.best[r] = top;
      if (faded != 1.0f)
        for (int d = 0; d < w.D; ++d) w.out[size_t(r) * w.D + d] *= faded;
    }
  }

  // Calls `act` with the group's rows in turn, up to three at once: more sums than that times
  // four do not stay in sixteen registers.
  template <class Act>
  void for_rows(Act act) const {
    int r = 0;
    for (; r + 3 <= group_; r += 3) act(std::integral_constant<int, 3>(), r);
    if (group_ - r == 2) act(std::integral_constant<int, 2>(), r);
    if (group_ - r == 1) act(std::integral_constant<int, 1>(), r);
  }

  // A head's K lie apart by a whole slot, which no hardware prefetcher follows: fetch those
  // some keys ahead, and V of this chunk on the way.
  [[gnu::always_inline]] void prefetch(const Workspace& w, int j, int count) const {
    const char *keys = static_cast<const char*>(a_.k_pages);
    const char *values = static_cast<const char*>(a_.v_pages);
    const int bytes = a_.head_dim * sizeof(T);
    for (int i = j; i < std::min(j + 4, count); ++i)
      for (int line = 0; line < bytes; line += 64) {
        __builtin_prefetch(values + w.offset[i] * sizeof(T) + line);
        if (i + kAhead < count) __builtin_prefetch(keys + w.offset[i + kAhead] * sizeof(T) + line);
      }
  }

  template <int R>
  void score_rows(int count, Workspace& w, int row) {
    const T* keys = static_cast<const T*>(a_.k_pages);
    for (int j = 0; j < count; j += 4) {
      if (row == 0) prefetch(w, j, count);
      Floats sum[R][4] = {};
      for (int d = 0; d < a_.head_dim; d += kLanes)
        for (int i = 0; i < 4; ++i) {
          const Floats x = load(keys + w.offset[j + i] + d);
          for (int r = 0; r < R; ++r) sum[r][i] += x * load(&w.q[size_t(row + r) * w.D + d]);
        }
      for (int r = 0; r < R; ++r)
        sums_of_4(sum[r][0], sum[r][1], sum[r][2], sum[r][3],
                  &w.scores[size_t(row + r) * kChunk + j]);
    }
  }

  template <int R>
  void add_rows(int count, Workspace& w, int row) {
    const int vectors = a_.head_dim / kLanes;
    int d = 0;
    for (; d + 4 <= vectors; d += 4) add_columns<R, 4>(count, w, row, d * kLanes);
    for (; d < vectors; ++d) add_columns<R, 1>(count, w, row, d * kLanes);
  }

  template <int R, int V>
  void add_columns(int count, Workspace& w, int row, int column) {
    const T* values = static_cast<const T*>(a_.v_pages) + column;
    Floats sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < V; ++i)
        sum[r][i] = load(&w.out[size_t(row + r) * w.D + column + i * kLanes]);
    for (int j = 0; j < count; ++j)
      for (int i = 0; i < V; ++i) {
        const Floats x = load(values + w.offset[j] + i * kLanes);
        for (int r = 0; r < R; ++r) sum[r][i] += w.scores[size_t(row + r) * kChunk + j] * x;
      }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < V; ++i)
        store(&w.out[size_t(row + r) * w.D + column + i * kLanes], sum[r][i]);
  }

  void finish(const Item& item, const Workspace& w) {
    if (item.partial >= 0) {
      float* to = &partials_[size_t(item.partial) * group_ * (w.D + 2)];
      for (int r = 0; r < w.rows; ++r, to += w.D + 2) {
        to[0] = w.best[r];
        to[1] = w.sum[r];
        std::memcpy(to + 2, &w.out[size_t(r) * w.D], w.D * sizeof(float));
      }
      return;
    }
    for (int r = 0; r < w.rows; ++r)
      write(item.seq, item.first_token + r / group_, item.kv_head * group_ + r % group_,
            &w.out[size_t(r) * w.D], w.sum[r]);
  }

  void combine(const Split& split) {
    const int D = whole(a_.head_dim, 2 * kLanes), stride = D + 2;
    std::vector<float> out(D);
    for (int r = 0; r < group_; ++r) {
      const float* part = &partials_[(size_t(split.first_partial) * group_ + r) * stride];
      const size_t next = size_t(group_) * stride;
      float best = kNever, sum = 0;
      for (int i = 0; i < split.num_partials; ++i) best = std::max(best, part[i * next]);
      std::fill(out.begin(), out.end(), 0.0f);
      for (int i = 0; i < split.num_partials; ++i) {
        const float* p = part + i * next;
        const float weight = exp_of(splat(p[0] - best))[0];
        sum += weight * p[1];
        for (int d = 0; d < D; ++d) out[d] += weight * p[2 + d];
      }
      write(split.seq, 0, split.kv_head * group_ + r, out.data(), sum);
    }
  }

  void write(int seq, int token, int head, const float* out, float sum) {
    const int64_t t = a_.query_start[seq] + token;
    char* to = static_cast<char*>(a_.out) +
               (t * a_.num_heads + head) * a_.head_dim * int64_t(size_of(a_.activation_dtype));
    narrow(out, a_.value_scale / sum, a_.activation_dtype, a_.head_dim, to);
  }
};

}  // namespace

extern "C" void paged_attention(const Args* args) {
  if (args->cache_dtype == kFloat32) Attention<float>(*args).run();
  if (args->cache_dtype == kBFloat16) Attention<BFloat16>(*args).run();
  if (args->cache_dtype == kFloat16) Attention<Float16>(*args).run();
  if (args->cache_dtype == kFloat8) Attention<Float8>(*args).run();
}
