// Memory of one thread that it keeps from call to call.

#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

// Begins at a cache line, as vectors and tiles of numbers should.
template <class T>
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() { free(); }

  // At least `size` elements; what was there may be lost.
  T* of(int64_t size) {
    if (size > size_) {
      free();
      data_ = static_cast<T*>(::operator new(size * sizeof(T), kLine));
      size_ = size;
    }
    return data_;
  }

  T* of(int64_t size, T value) {
    std::fill_n(of(size), size, value);
    return data_;
  }

 private:
  static constexpr std::align_val_t kLine{64};

  void free() { ::operator delete(data_, kLine); }

  T* data_ = nullptr;
  int64_t size_ = 0;
};
