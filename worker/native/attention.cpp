// Paged causal attention on CPU: all new K and V are stored, then every query attends.
//
//   item       one KV head of one sequence, some of its query tokens, some of its keys
//   row        one query head of one query token; the `group` query heads of a KV head are
//              rows side by side, so K and V are read once for all of them
//   chunk      kChunk keys: scores, running maximum and sum, weighted V (the online softmax)
//   score      in units of log2(e), so that a weight is 2^(score - best)
//
// A sequence with one query token (a decode) reads K and V where they lie; its keys are split
// into spans of a fixed size so that few sequences still feed all threads. More query tokens
// (a prefill chunk) are worth laying a chunk of K and V out first: widened to float, or in
// bfloat16 for matrix units. Spans and items are cut by the sequence alone, so a result does not
// depend on its batch mates or on the number of threads.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.hpp"
#include "attention_tiles.hpp"
#include "products.hpp"

namespace {

constexpr int kAhead = 16;       // keys fetched before they are scored
constexpr int kSpan = 512;       // keys of one item of a decode
constexpr int kItemRows = 192;   // of a prefill, about
constexpr int kTiledRows = 256;  // the same on matrix units
constexpr float kLog2OfE = 1.44269504f;

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
    const int tile = std::max(1, (a_.tiled ? kTiledRows : kItemRows) / group_);
    for (int s = 0; s < a_.num_seqs; ++s) {
      const int queries = a_.query_start[s + 1] - a_.query_start[s], keys = a_.kv_len[s];
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
    if constexpr (std::is_same_v<T, BFloat16>)
      if (a_.tiled && item.num_tokens > 1) return attend_tiled(item, w);
    w.size_for(a_.head_dim, item.num_tokens * group_);
    load_queries(item, w);
    const bool direct = item.num_tokens == 1 && a_.head_dim % kLanes == 0;
    if (!direct) w.size_for_chunk();
    for (int key = item.first_key; key < item.end_key; key += kChunk) {
      const int count = std::min(kChunk, item.end_key - key);
      locate(item, key, count, w);
      if (direct) {
        for_rows([&](auto rows, int r) { score_rows<rows()>(count, w, r); });
      } else {
        widen_chunk(count, w);
        multiply(w.q, w.D, w.keys, kChunk, w.scores, kChunk, w.rows, w.D,
                 whole(count, 2 * kLanes), false);
      }
      for (int r = 0; r < w.rows; ++r) {
        float* score = &w.scores[size_t(r) * kChunk];
        weigh(item, key, count, 1.0f, r, score, w,
              [=](int j, Floats weight) { store(score + j, weight); });
      }
      if (direct) {
        for_rows([&](auto rows, int r) { add_rows<rows()>(count, w, r); });
      } else {
        multiply(w.scores, kChunk, w.values, w.D, w.out, w.D, w.rows, count, w.D, true);
      }
    }
    finish(item, w);
  }

  void attend_tiled(const Item& item, Workspace& w) {
    static thread_local TileLayout layout;
    const Tiles units;
    const int num_rows = item.num_tokens * group_;
    w.size_for(a_.head_dim, whole(num_rows, kPair));
    layout.size_for(a_.head_dim, w.rows);
    for (int r = 0; r < num_rows; ++r)
      layout.set_query(r, static_cast<const BFloat16*>(query(item, r)));
    for (int key = item.first_key; key < item.end_key; key += kChunk) {
      const int count = std::min(kChunk, item.end_key - key);
      locate(item, key, count, w);
      layout.set_keys(static_cast<const BFloat16*>(a_.k_pages),
                      static_cast<const BFloat16*>(a_.v_pages), w.offset, count);
      for (int first = 0; first < num_rows; first += kPair) {
        const int last = std::min(first + kPair, num_rows) - 1;
        const int seen = std::min(count, position_of(item, last) + 1 - key);
        if (seen <= 0) continue;
        layout.score(units, first, seen, w.scores);
        for (int r = 0; r < kPair; ++r)
          weigh(item, key, seen, score_scale(), first + r, &w.scores[size_t(r) * kChunk], w,
                layout.weights_of(r, seen));
        layout.add(units, seen, &w.out[size_t(first) * w.D]);
      }
    }
    w.rows = num_rows;
    finish(item, w);
  }

  float score_scale() const { return a_.score_scale * kLog2OfE; }

  int position_of(const Item& item, int r) const {
    const int queries = a_.query_start[item.seq + 1] - a_.query_start[item.seq];
    return a_.kv_len[item.seq] - queries + item.first_token + r / group_;
  }

  const void* query(const Item& item, int r) const {
    const int64_t t = a_.query_start[item.seq] + item.first_token + r / group_;
    const int64_t h = item.kv_head * group_ + r % group_;
    return static_cast<const char*>(a_.q) +
           (t * a_.q_strides[0] + h * a_.q_strides[1]) * int64_t(size_of(a_.activation_dtype));
  }

  void load_queries(const Item& item, Workspace& w) {
    for (int r = 0; r < w.rows; ++r) {
      float* row = &w.q[size_t(r) * w.D];
      widen(query(item, r), a_.activation_dtype, a_.head_dim, row);
      for (int d = 0; d < a_.head_dim; ++d) row[d] *= score_scale();
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

  // `put(j, weights)` is told what becomes of the scores of row r, times `scale`: weights
  // 2^(score - best), up to a whole vector. What was summed before is scaled to the new best.
  template <class Put>
  void weigh(const Item& item, int key, int count, float scale, int r, float* score, Workspace& w,
             Put put) const {
    const int position = position_of(item, r), padded = whole(count, kLanes);
    const int begin = std::clamp(first_seen(position) - key, 0, count);
    const int end = std::clamp(position + 1 - key, begin, count);
    if (const float cap = a_.softcap * kLog2OfE; cap != 0) {
      for (int j = 0; j < padded; j += kLanes)
        store(score + j, cap * tanh_of(load(score + j) * scale / cap));
      scale = 1;
    }
    for (int j = 0; j < begin; ++j) score[j] = kNever;
    for (int j = end; j < padded; ++j) score[j] = kNever;
    Floats best = splat(kNever);
    for (int j = 0; j < padded; j += kLanes) best = max(best, load(score + j));
    const float before = w.best[r], top = std::max(before, max_of(best) * scale);
    if (top == kNever) {  // nothing seen yet, as before a window's begin
      for (int j = 0; j < padded; j += kLanes) put(j, Floats{});
      return;
    }
    if (top != before) {
      const float faded = exp2_of(splat(before - top))[0];
      w.best[r] = top;
      w.sum[r] *= faded;
      for (int d = 0; d < w.D; ++d) w.out[size_t(r) * w.D + d] *= faded;
    }
    Floats sum{};
    for (int j = 0; j < padded; j += kLanes) {
      const Floats weight = exp2_of(load(score + j) * scale - top);
      put(j, weight);
      sum += weight;
    }
    w.sum[r] += sum_of(sum);
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
  // some keys ahead, and V of this chunk on the way. Inlined, because gcc drops a call of what
  // changes nothing.
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
        const float weight = exp2_of(splat(p[0] - best))[0];
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

extern "C" int32_t attention_has_tiles() { return has_tiles(); }

extern "C" void paged_attention(const Args* args) {
  if (args->cache_dtype == kFloat32) Attention<float>(*args).run();
  if (args->cache_dtype == kBFloat16) Attention<BFloat16>(*args).run();
  if (args->cache_dtype == kFloat16) Attention<Float16>(*args).run();
  if (args->cache_dtype == kFloat8) Attention<Float8>(*args).run();
}
