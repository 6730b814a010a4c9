// The elements of a chunk that a sparse kind keeps, and what is done with them at either end.
#pragma once

#include "codecs/lanes.h"

namespace shoal {
namespace {

// Positions of elements, ascending; a list has room for what is written past its end.
struct Positions {
  static constexpr size_t at_once = 4;
  uint16_t at[codec_chunk + at_once];
  size_t count = 0;
};

// Writes a chunk without what is sent of it. Not past the caches: the stores of one chunk go to memory while the next
// one is computed, and that is quicker.
inline void write_rest(const float* chunk, size_t length, const Positions& kept, const float* sent,
                       float* residual) {
  if (residual != chunk) std::memcpy(residual, chunk, length * sizeof(float));
  for (size_t index = 0; index < kept.count; ++index) residual[kept.at[index]] -= sent[index];
}

// Writes a chunk of zeros with some elements. Past the caches it goes from a chunk of zeros that stays in them.
template <class U>
class ReplaceKept {
 public:
  ReplaceKept(const float* out, size_t count) : streamed_(is_streamed(out, count)) {}

  void operator()(float* out, size_t length, const Positions& kept, const float* sent) {
    float* const to = streamed_ ? chunk_ : out;
    if (!streamed_) std::memset(out, 0, length * sizeof(float));
    for (size_t index = 0; index < kept.count; ++index) to[kept.at[index]] = sent[index];
    if (!streamed_) return;
    stream_all<U>(out, chunk_, length);
    for (size_t index = 0; index < kept.count; ++index) chunk_[kept.at[index]] = 0.0f;
  }
  void finish() {
    if (streamed_) U::fence();
  }

 private:
  alignas(64) float chunk_[codec_chunk] = {};
  const bool streamed_;
};

// Adds to some elements of a vector, each of which is likely to be in another cache line: lines are fetched when their
// elements are told, and elements are added when `delay` others have been told.
class AddKept {
 public:
  explicit AddKept(float factor) : factor_(factor) {
    for (float*& place : places_) place = &nowhere_;
  }
  AddKept(const AddKept&) = delete;

  void operator()(float* out, size_t, const Positions& kept, const float* sent) {
    for (size_t index = 0; index < kept.count; ++index) {
      float* const place = out + kept.at[index];
      __builtin_prefetch(place, 1);
      add(told_++ % delay);
      places_[(told_ - 1) % delay] = place;
      values_[(told_ - 1) % delay] = sent[index] * factor_;
    }
  }
  void finish() {
    for (size_t index = 0; index < delay; ++index) add((told_ + index) % delay);
  }

 private:
  static constexpr size_t delay = 64;

  void add(size_t slot) { *places_[slot] += values_[slot]; }

  const float factor_;
  size_t told_ = 0;
  float nowhere_ = 0.0f;
  float* places_[delay];
  float values_[delay] = {};
};

}  // namespace
}  // namespace shoal
