// Collectives between ranks on one host, through one shared segment.
//
//   segment    [ header | flags of rank 0, 1, ... | slots of rank 0: even, odd | slots of 1 | ... ]
//   operation  every rank copies its part into its slot, raises its flag to the operation's
//              number, waits for the flags of the others, and reads their slots
//
// Operations alternate between two slots. Whoever begins operation n has seen every flag at
// n - 1 or more, so everybody has left operation n - 2 and its slot may be written over.
//
// A rank that leaves says so. Its peers still finish what it took part in, because its flag is up
// and its slot is full; who waits for more gives up.
//
// Sums run over ranks 0, 1, ... in float for every element, so all ranks hold the same bits.

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "vectors.hpp"

namespace {

constexpr int64_t kSpinNanoseconds = 20'000;     // longer, and it takes the core of its peer
constexpr int64_t kYieldNanoseconds = 2'000'000;
constexpr int64_t kSleepNanoseconds = 50'000;
constexpr int64_t kLookNanoseconds = 1'000'000;  // between looks whether the peers live
constexpr int64_t kWholeBytes = 32 << 10;        // up to here every rank sums everything
constexpr int kSumBlock = 1024;                  // elements summed at once, in the cache

enum Status { kDone = 0, kAborted = 1, kLate = 2, kPeerDied = 3, kPeerLeft = 4 };

struct alignas(64) Flag {
  std::atomic<uint64_t> entered, reduced;
  std::atomic<uint32_t> left;
};

struct alignas(64) Header {
  std::atomic<uint32_t> abort;
};

int64_t now_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Channel {
  Header* header;
  Flag* flags;
  char* slots;
  int rank, size;
  int64_t slot_bytes, deadline_nanoseconds;
  std::vector<pollfd> peers;  // process handles: readable when the process has ended
  std::atomic<bool> aborted{false};
  uint64_t operation = 0;

  char* slot(int of) const { return slots + (of * 2 + (operation & 1)) * slot_bytes; }

  Status wait(int of, std::atomic<uint64_t> Flag::*flag) { return wait(of, flag, operation); }

  Status wait(int of, std::atomic<uint64_t> Flag::*flag, uint64_t value) {
    const auto& raised = flags[of].*flag;
    if (raised.load(std::memory_order_acquire) >= value) return kDone;
    const int64_t began = now_nanoseconds();
    int64_t looked = began;
    for (;;) {
      for (int i = 0; i < 64; ++i) {
        if (raised.load(std::memory_order_acquire) >= value) return kDone;
        pause_briefly();
      }
      if (aborted.load() || header->abort.load()) return kAborted;
      if (flags[of].left.load(std::memory_order_acquire))
        return raised.load(std::memory_order_acquire) >= value ? kDone : kPeerLeft;
      const int64_t now = now_nanoseconds();
      if (now - began > kYieldNanoseconds) {
        const timespec nap{0, kSleepNanoseconds};
        nanosleep(&nap, nullptr);
      } else if (now - began > kSpinNanoseconds) {
        sched_yield();
      }
      if (now - looked > kLookNanoseconds) {
        looked = now;
        if (now - began > deadline_nanoseconds) return kLate;
        if (!peers.empty() && poll(peers.data(), peers.size(), 0) > 0) {
          // It may have raised its flag and ended in good order.
          return raised.load(std::memory_order_acquire) >= value ? kDone : kPeerDied;
        }
      }
    }
  }

  // Begin the next operation: nobody reads this rank's slot any more.
  Status begin() {
    if (aborted.load() || header->abort.load()) return kAborted;
    ++operation;
    if (operation < 2) return kDone;
    for (int of = 0; of < size; ++of)
      if (Status s = wait(of, &Flag::entered, operation - 1)) return s;
    return kDone;
  }

  void raise(std::atomic<uint64_t> Flag::*flag) {
    (flags[rank].*flag).store(operation, std::memory_order_release);
  }

  Status wait_all(std::atomic<uint64_t> Flag::*flag) {
    for (int of = 0; of < size; ++of)
      if (Status s = wait(of, flag)) return s;
    return kDone;
  }
};

// to[begin, end) <- the sum of everybody's slot.
template <class T>
void sum_slots(const Channel& c, int64_t begin, int64_t end, T* to) {
  std::vector<const T*> from(c.size);
  for (int r = 0; r < c.size; ++r) from[r] = reinterpret_cast<const T*>(c.slot(r));
  float sum[kSumBlock];
  for (int64_t i = begin; i < end; i += kSumBlock) {
    const int n = int(std::min<int64_t>(kSumBlock, end - i));
    for (int j = 0; j < n; ++j) sum[j] = to_float(from[0][i + j]);
    for (int r = 1; r < c.size; ++r)
      for (int j = 0; j < n; ++j) sum[j] += to_float(from[r][i + j]);
    for (int j = 0; j < n; ++j) store(to + i + j, sum[j]);
  }
}

template <class T>
Status all_reduce_part(Channel& c, T* x, int64_t n) {
  if (Status s = c.begin()) return s;
  T* own = reinterpret_cast<T*>(c.slot(c.rank));
  std::memcpy(own, x, n * sizeof(T));
  c.raise(&Flag::entered);
  if (Status s = c.wait_all(&Flag::entered)) return s;
  if (n * int64_t(sizeof(T)) <= kWholeBytes) {
    sum_slots(c, 0, n, x);
    return kDone;
  }
  // Larger: each rank sums one share, in place, and takes the others' shares from them.
  const int64_t share = (n + c.size - 1) / c.size;
  auto begin_of = [&](int r) { return std::min(n, r * share); };
  sum_slots(c, begin_of(c.rank), begin_of(c.rank + 1), own);
  c.raise(&Flag::reduced);
  for (int r = 0; r < c.size; ++r) {
    if (Status s = c.wait(r, &Flag::reduced)) return s;
    const int64_t begin = begin_of(r), count = begin_of(r + 1) - begin;
    std::memcpy(x + begin, reinterpret_cast<const T*>(c.slot(r)) + begin, count * sizeof(T));
  }
  return kDone;
}

template <class T>
Status all_reduce_all(Channel& c, void* data, int64_t n) {
  const int64_t part = c.slot_bytes / int64_t(sizeof(T));
  for (int64_t i = 0; i < n; i += part)
    if (Status s = all_reduce_part(c, static_cast<T*>(data) + i, std::min(part, n - i))) return s;
  return kDone;
}

}  // namespace

extern "C" {

int64_t segment_bytes(int size, int64_t slot_bytes) {
  return sizeof(Header) + size * int64_t(sizeof(Flag)) + 2 * size * slot_bytes;
}

// `segment` is zeroed by its creator. `peers` are handles of the processes of other ranks.
Channel* open_channel(void* segment, int rank, int size, int64_t slot_bytes, double deadline_seconds,
                      const int32_t* peers, int num_peers) {
  auto* c = new Channel;
  char* base = static_cast<char*>(segment);
  c->header = reinterpret_cast<Header*>(base);
  c->flags = reinterpret_cast<Flag*>(base + sizeof(Header));
  c->slots = base + sizeof(Header) + size * sizeof(Flag);
  c->rank = rank;
  c->size = size;
  c->slot_bytes = slot_bytes;
  c->deadline_nanoseconds = int64_t(deadline_seconds * 1e9);
  for (int i = 0; i < num_peers; ++i) c->peers.push_back({peers[i], POLLIN, 0});
  return c;
}

void close_channel(Channel* c) {
  c->flags[c->rank].left.store(1, std::memory_order_release);
  delete c;
}

// Every rank of the group gives up, whatever it waits for.
void abort_channel(Channel* c) {
  c->aborted.store(true);
  c->header->abort.store(1);
}

// The collectives take a null channel, one that was closed, as aborted.

int all_reduce(Channel* c, void* data, int64_t n, int32_t dtype) {
  if (!c) return kAborted;
  if (dtype == kFloat32) return all_reduce_all<float>(*c, data, n);
  if (dtype == kBFloat16) return all_reduce_all<BFloat16>(*c, data, n);
  return all_reduce_all<Float16>(*c, data, n);
}

// out[rows, size, row_bytes] <- everybody's x[rows, row_bytes].
int all_gather(Channel* c, const void* x, void* out, int64_t rows, int64_t row_bytes) {
  if (!c) return kAborted;
  const int64_t piece = std::min(row_bytes, c->slot_bytes);
  const int64_t rows_at_once = std::max<int64_t>(1, c->slot_bytes / std::max<int64_t>(1, row_bytes));
  for (int64_t row = 0; row < rows; row += rows_at_once) {
    const int64_t count = std::min(rows_at_once, rows - row);
    for (int64_t at = 0; at < row_bytes; at += piece) {
      const int64_t bytes = std::min(piece, row_bytes - at);
      if (Status s = c->begin()) return s;
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(c->slot(c->rank) + i * bytes,
                    static_cast<const char*>(x) + (row + i) * row_bytes + at, bytes);
      c->raise(&Flag::entered);
      for (int r = 0; r < c->size; ++r) {
        if (Status s = c->wait(r, &Flag::entered)) return s;
        for (int64_t i = 0; i < count; ++i)
          std::memcpy(static_cast<char*>(out) + ((row + i) * c->size + r) * row_bytes + at,
                      c->slot(r) + i * bytes, bytes);
      }
    }
  }
  return kDone;
}

// x <- rank 0's x. Rank 0 does not wait for the others.
int broadcast(Channel* c, void* x, int64_t bytes) {
  if (!c) return kAborted;
  for (int64_t at = 0; at < bytes; at += c->slot_bytes) {
    const int64_t count = std::min(c->slot_bytes, bytes - at);
    if (Status s = c->begin()) return s;
    if (c->rank == 0) std::memcpy(c->slot(0), static_cast<char*>(x) + at, count);
    c->raise(&Flag::entered);
    if (c->rank == 0) continue;
    if (Status s = c->wait(0, &Flag::entered)) return s;
    std::memcpy(static_cast<char*>(x) + at, c->slot(0), count);
  }
  return kDone;
}
}
