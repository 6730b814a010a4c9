#include "transport/shared_buffers.h"

#include <algorithm>

#include "common/error.h"

namespace shoal {

void* SharedBuffers::allocate(size_t bytes) {
  // Sizes are rounded, so that what is nearly the same size again finds the buffer of last time.
  const size_t grain = bytes < (size_t{1} << 20) ? 4096 : size_t{1} << 16;
  const size_t rounded = (std::max(bytes, size_t{1}) + grain - 1) / grain * grain;
  std::lock_guard lock(mutex_);
  Segment buffer;
  for (size_t i = cache_.size(); i-- > 0;) {
    if (cache_[i].bytes() == rounded) {
      buffer = std::move(cache_[i]);
      cache_.erase(cache_.begin() + static_cast<std::ptrdiff_t>(i));
      cached_bytes_ -= rounded;
      break;
    }
  }
  if (buffer.data() == nullptr) buffer = Segment::create(rounded);
  void* data = buffer.data();
  in_use_.emplace(reinterpret_cast<uintptr_t>(data), std::move(buffer));
  return data;
}

void SharedBuffers::release(void* data) {
  std::lock_guard lock(mutex_);
  cache_.push_back(take_back(data));
  cached_bytes_ += cache_.back().bytes();
  if (cached_bytes_ > cache_limit) drop_cache();
}

void SharedBuffers::discard(void* data) {
  std::lock_guard lock(mutex_);
  take_back(data).revoke();  // its pages stay: a peer may be in the middle of using them
  released_.fetch_add(1, std::memory_order_release);
}

Segment SharedBuffers::take_back(void* data) {
  const auto found = in_use_.find(reinterpret_cast<uintptr_t>(data));
  if (found == in_use_.end()) throw Failure(Code::invalid, -1, "no shared buffer begins at this address");
  Segment buffer = std::move(found->second);
  in_use_.erase(found);
  return buffer;
}

void SharedBuffers::trim() {
  std::lock_guard lock(mutex_);
  drop_cache();
}

void SharedBuffers::drop_cache() {
  for (Segment& buffer : cache_) buffer.give_back();
  released_.fetch_add(static_cast<uint32_t>(cache_.size()), std::memory_order_release);
  cache_.clear();
  cached_bytes_ = 0;
}

bool SharedBuffers::find(const void* data, size_t bytes, Place& place) {
  std::lock_guard lock(mutex_);
  const auto holder = holder_of(data);
  if (holder == in_use_.end()) return false;
  const auto& [begin, buffer] = *holder;
  const size_t offset = reinterpret_cast<uintptr_t>(data) - begin;
  if (bytes > buffer.bytes() - offset) return false;
  place = {buffer.descriptor(), buffer.identity(), offset};
  return true;
}

void SharedBuffers::detach(const void* data) {
  std::lock_guard lock(mutex_);
  const auto holder = holder_of(data);
  if (holder == in_use_.end()) return;
  holder->second.detach();
  released_.fetch_add(1, std::memory_order_release);
}

std::map<uintptr_t, Segment>::iterator SharedBuffers::holder_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto after = in_use_.upper_bound(address);
  if (after == in_use_.begin()) return in_use_.end();
  const auto holder = std::prev(after);
  return address < holder->first + holder->second.bytes() ? holder : in_use_.end();
}

}  // namespace shoal
