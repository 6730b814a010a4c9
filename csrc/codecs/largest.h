// The elements of a chunk that are largest.
//
// Magnitudes are compared as integers: the bits of a float32 without its sign are in the order of its magnitude, with
// infinity and NaN above all numbers. The elements of at least some magnitude are marked in a bitmap by one pass. The
// chunk is read from memory once, and from the cache after that.
//
// The k largest are found in linear time. If the chunk is cut into 256 groups, the k-th largest of the groups' maxima
// is at most the k-th largest magnitude, and for small k little less: few more than k elements are at least as large.
// Of those the exact one is found by a search that counts at each step.
#pragma once

#include "codecs/kept.h"

namespace shoal {
namespace {

constexpr size_t group_count = 256;
constexpr size_t word_bits = 64;

template <class U>
typename U::Int vector_at(const int32_t* magnitudes) {
  return load<typename U::Int>(reinterpret_cast<const std::byte*>(magnitudes));
}

// The largest magnitude that is at most another, and the smallest that is at least another.
template <class U>
int32_t largest_to(const int32_t* magnitudes, size_t count, int32_t limit) {
  typename U::Int largest{};
  for (size_t at = 0; at < count; at += U::lanes) {
    const typename U::Int vector = vector_at<U>(magnitudes + at);
    largest = U::larger(largest, vector & (vector <= limit));
  }
  return largest_lane<U>(largest);
}

template <class U>
int32_t smallest_from(const int32_t* magnitudes, size_t count, int32_t limit) {
  const auto none = all<typename U::Int>(static_cast<int32_t>(magnitude_bits));
  typename U::Int smallest = none;
  for (size_t at = 0; at < count; at += U::lanes) {
    const typename U::Int vector = vector_at<U>(magnitudes + at);
    smallest = U::smaller(smallest, vector >= limit ? vector : none);
  }
  return smallest_lane<U>(smallest);
}

template <class U>
size_t count_at_least(const int32_t* magnitudes, size_t count, int32_t least) {
  size_t found = 0;
  for (size_t at = 0; at < count; at += U::lanes)
    found += static_cast<size_t>(__builtin_popcount(U::at_least(vector_at<U>(magnitudes + at), least)));
  return found;
}

// A magnitude that at least k, and at most `most` elements reach; where no such magnitude exists because of ties, the
// k-th largest. `low` is reached by `at_low`, which are at least k. The count is of whole vectors.
//
// Between a magnitude that enough reach and one that too few reach, the next one is tried where a line through both
// counts has the wanted one. Every third step narrows the two to magnitudes that occur, and tries the one half-way:
// that bounds the number of steps, with ties too.
template <class U>
int32_t search(const int32_t* magnitudes, size_t count, size_t k, size_t most, int32_t low, size_t at_low) {
  int32_t high = largest_to<U>(magnitudes, count, static_cast<int32_t>(magnitude_bits));
  size_t above_high = 0;
  const size_t wanted = (k + most) / 2;
  for (size_t step = 1; at_low > most && low < high; ++step) {
    if (step % 3 == 0) {
      low = smallest_from<U>(magnitudes, count, low);
      high = largest_to<U>(magnitudes, count, high);
      if (low >= high) break;
    }
    const auto inner = static_cast<uint64_t>(high - low - 1);
    const uint64_t share = step % 3 == 0 ? inner / 2 : inner * (at_low - wanted) / (at_low - above_high);
    const int32_t middle = low + 1 + static_cast<int32_t>(share);
    const size_t found = count_at_least<U>(magnitudes, count, middle);
    if (found < k) {
      high = middle - 1;
      above_high = found;
    } else {
      low = middle;
      at_low = found;
    }
  }
  return low;
}

// A magnitude that at least k elements of a chunk reach, and few more.
template <class U>
int32_t lower_bound(const float* chunk, size_t k) {
  if (k <= group_count / 2) {
    int32_t maxima[group_count];
    typename U::Int smallest = all<typename U::Int>(static_cast<int32_t>(magnitude_bits));
    constexpr size_t vectors = group_count / U::lanes;
    typename U::Int largest[vectors] = {};
    for (size_t at = 0; at < codec_chunk; at += group_count)
#pragma GCC unroll 16
      for (size_t group = 0; group < vectors; ++group)
        largest[group] = U::larger(largest[group], U::magnitudes(U::read(chunk + at + group * U::lanes)));
#pragma GCC unroll 16
    for (size_t group = 0; group < vectors; ++group) {
      smallest = U::smaller(smallest, largest[group]);
      store(reinterpret_cast<std::byte*>(maxima + group * U::lanes), largest[group]);
    }
    return search<U>(maxima, group_count, k, k + k / 8, smallest_lane<U>(smallest), group_count);
  }
  int32_t magnitudes[codec_chunk];
  for (size_t at = 0; at < codec_chunk; at += U::lanes)
    store(reinterpret_cast<std::byte*>(magnitudes + at), U::magnitudes(U::read(chunk + at)));
  return search<U>(magnitudes, codec_chunk, k, k, 0, codec_chunk);
}

// Lists the elements of at least a magnitude. The next chunk is fetched from memory meanwhile, and where the chunk's
// residual will be written, unless null.
template <class U>
void list_at_least(const float* chunk, int32_t least, const float* residual, Positions& found) {
  size_t count = 0;
  for (size_t begin = 0; begin < codec_chunk; begin += word_bits) {
    uint64_t word = 0;
    for (size_t line = 0; line < word_bits; line += line_elements) fetch(chunk + begin + line + chunk_ahead);
    if (residual != nullptr)
      for (size_t line = 0; line < word_bits; line += line_elements) fetch(residual + begin + line);
#pragma GCC unroll 16
    for (size_t at = 0; at < word_bits; at += U::lanes)
      word |= static_cast<uint64_t>(U::at_least(U::magnitudes(U::read(chunk + begin + at)), least)) << at;
    const size_t more = static_cast<size_t>(__builtin_popcountll(word));
    uint16_t* to = found.at + count;
    // Mostly few: a fixed number is written without a branch for each, and overwritten where it is too many.
    for (size_t index = 0; index < Positions::at_once || index < more; ++index, word &= word - 1)
      to[index] = static_cast<uint16_t>(begin + static_cast<size_t>(__builtin_ctzll(word | (1ull << 63))));
    count += more;
  }
  found.count = count;
}

// Keeps the k largest; of equal magnitudes those of the lowest positions.
template <class U>
void keep_largest(const float* chunk, size_t k, int32_t least, Positions& found) {
  int32_t magnitudes[codec_chunk];
  const size_t padded = (found.count + U::lanes - 1) / U::lanes * U::lanes;
  for (size_t index = 0; index < found.count; ++index) magnitudes[index] = magnitude_of(chunk[found.at[index]]);
  for (size_t index = found.count; index < padded; ++index) magnitudes[index] = -1;
  const int32_t smallest = search<U>(magnitudes, padded, k, k, least, found.count);
  size_t larger = 0;
  for (size_t index = 0; index < found.count; ++index) larger += magnitudes[index] > smallest;
  size_t equal = k - larger, kept = 0;
  for (size_t index = 0; index < found.count; ++index) {
    const bool is_equal = magnitudes[index] == smallest && equal > 0;
    equal -= is_equal;
    found.at[kept] = found.at[index];
    kept += is_equal || magnitudes[index] > smallest;
  }
  found.count = kept;
}

template <class U>
void list_largest(const float* chunk, size_t k, Positions& found) {
  const int32_t least = lower_bound<U>(chunk, k);
  list_at_least<U>(chunk, least, nullptr, found);
  if (found.count > k) keep_largest<U>(chunk, k, least, found);
}

}  // namespace
}  // namespace shoal
