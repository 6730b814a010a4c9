#include "transport/shared_buffers.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <string>

#include "common/error.h"
#include "transport/descriptor.h"

namespace shoal {

namespace {

Failure with_more(const Failure& failure, const std::string& text) {
  return Failure(failure.code, failure.rank, failure.what() + text, failure.error);
}

}  // namespace

size_t SharedBuffers::default_most_kept() {
  constexpr size_t most = 128;
  return std::clamp<size_t>(descriptor_limit() / 8, 1, most);
}

SharedBuffers::SharedBuffers(size_t most_kept) : most_kept_(most_kept) {}

void* SharedBuffers::allocate(size_t bytes) {
  // Sizes are rounded, so that a request of nearly the same size gets the same buffer again.
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  constexpr size_t fine = 4096, coarse = size_t{1} << 16, huge = SIZE_MAX / 2;
  size_t block_bytes = std::min(bytes, huge);
  if (bytes <= largest_small) {
    block_bytes = std::bit_ceil(std::max(bytes, page));
  } else {
    const size_t grain = bytes < (size_t{1} << 20) ? fine : coarse;
    block_bytes = (block_bytes + grain - 1) / grain * grain;
  }
  std::lock_guard lock(mutex_);
  Slab& slab = slab_with_room(block_bytes);
  if (slab.used == 0) {
    busy_.splice(busy_.end(), kept_, slab.listed);
    kept_bytes_ -= slab.segment.bytes();
  }
  const size_t index = slab.free.back();
  slab.free.pop_back();
  slab.blocks[index] = Block::used;
  ++slab.used;
  if (slab.free.empty()) with_room_[block_bytes].pop_back();
  return slab.segment.data() + index * block_bytes;
}

// The slab that was used last, or a new one, which is kept.
SharedBuffers::Slab& SharedBuffers::slab_with_room(size_t block_bytes) {
  if (const auto found = with_room_.find(block_bytes); found != with_room_.end() && !found->second.empty()) {
    return *found->second.back();
  }
  Segment segment = make_segment(std::max(block_bytes, block_bytes <= largest_small ? slab_bytes : 0));
  const auto address = reinterpret_cast<uintptr_t>(segment.data());
  const size_t blocks = segment.bytes() / block_bytes;
  Slab& slab = slabs_[address];
  slab.segment = std::move(segment);
  slab.block_bytes = block_bytes;
  slab.blocks.resize(blocks, Block::free);
  for (size_t index = blocks; index-- > 0;) slab.free.push_back(index);
  slab.listed = kept_.insert(kept_.end(), &slab);
  kept_bytes_ += slab.segment.bytes();
  with_room_[block_bytes].push_back(&slab);
  return slab;
}

// If the system has no more, gives it the kept slabs back, and asks again.
Segment SharedBuffers::make_segment(size_t bytes) {
  try {
    return Segment::create(bytes);
  } catch (const Failure& failure) {
    if (!has_run_out(failure.error)) throw;
  }
  while (!kept_.empty()) give_back_oldest();
  try {
    return Segment::create(bytes);
  } catch (const Failure& failure) {
    const std::string in_use = "; segments of shared buffers in use: " + std::to_string(busy_.size());
    throw with_more(failure, in_use);
  }
}

void SharedBuffers::release(void* data) {
  std::lock_guard lock(mutex_);
  const auto [slab, index] = buffer_at(data);
  // A rank that still runs after a failure may write to the old pages of a detached block.
  take_from(*slab, index, forget_moved(*slab, index) ? Block::lost : Block::free);
}

void SharedBuffers::discard(void* data) {
  std::lock_guard lock(mutex_);
  const auto [slab, index] = buffer_at(data);
  forget_moved(*slab, index);
  take_from(*slab, index, Block::lost);
}

void SharedBuffers::take_from(Slab& slab, size_t index, Block becomes) {
  slab.blocks[index] = becomes;
  --slab.used;
  if (becomes == Block::free) {
    if (slab.free.empty()) with_room_[slab.block_bytes].push_back(&slab);
    slab.free.push_back(index);
  }
  if (slab.used > 0) return;
  if (slab.free.size() < slab.blocks.size()) {
    slab.segment.revoke();  // nothing uses it again, and peers may be using the lost blocks
    return forget(slab);
  }
  const bool is_too_large = slab.segment.bytes() > most_kept_bytes;  // then do not give the other slabs back for it
  kept_.splice(is_too_large ? kept_.begin() : kept_.end(), busy_, slab.listed);
  kept_bytes_ += slab.segment.bytes();
  while (kept_bytes_ > most_kept_bytes || kept_.size() > most_kept_) give_back_oldest();
}

// Forgets that the block was moved; true if it was, and then it must not be used again.
bool SharedBuffers::forget_moved(Slab& slab, size_t index) {
  const auto found = slab.moved.find(index);
  if (found == slab.moved.end()) return false;
  found->second.revoke();
  slab.moved.erase(found);
  released_.fetch_add(1, std::memory_order_release);
  return true;
}

// For a slab without buffers.
void SharedBuffers::forget(Slab& slab) {
  auto& with_room = with_room_[slab.block_bytes];
  std::erase(with_room, &slab);
  if (with_room.empty()) with_room_.erase(slab.block_bytes);
  (slab.free.size() < slab.blocks.size() ? busy_ : kept_).erase(slab.listed);
  slabs_.erase(reinterpret_cast<uintptr_t>(slab.segment.data()));
  released_.fetch_add(1, std::memory_order_release);
}

void SharedBuffers::give_back_oldest() {
  Slab& slab = *kept_.front();
  kept_bytes_ -= slab.segment.bytes();
  slab.segment.give_back();
  forget(slab);
}

size_t SharedBuffers::trim() {
  std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (; !kept_.empty(); give_back_oldest()) bytes += kept_.front()->segment.resident();
  for (Slab* slab : busy_) {
    if (slab->free.empty()) continue;
    const size_t before = slab->segment.resident();
    for (const size_t index : slab->free) slab->segment.give_back(index * slab->block_bytes, slab->block_bytes);
    bytes += before - std::min(before, slab->segment.resident());
  }
  return bytes;
}

bool SharedBuffers::find(const void* data, size_t bytes, Place& place) {
  std::lock_guard lock(mutex_);
  const auto [slab, index] = block_at(data);
  if (slab == nullptr || slab->blocks[index] != Block::used) return false;
  const auto address = static_cast<const std::byte*>(data);
  const size_t in_slab = static_cast<size_t>(address - slab->segment.data());
  const size_t in_block = in_slab - index * slab->block_bytes;
  if (bytes > slab->block_bytes - in_block) return false;
  if (const auto moved = slab->moved.find(index); moved != slab->moved.end()) {
    place = {moved->second.descriptor(), moved->second.identity(), in_block};
  } else {
    place = {slab->segment.descriptor(), slab->segment.identity(), in_slab};
  }
  return true;
}

void SharedBuffers::detach(const void* data) {
  std::lock_guard lock(mutex_);
  const auto [slab, index] = block_at(data);
  if (slab == nullptr || slab->blocks[index] != Block::used) return;
  if (slab->blocks.size() == 1) {
    slab->segment.detach();
  } else {
    // Other blocks of the slab may be in use by working groups.
    auto moved = slab->segment.detach(index * slab->block_bytes, slab->block_bytes);
    forget_moved(*slab, index);
    slab->moved[index] = std::move(moved);
  }
  released_.fetch_add(1, std::memory_order_release);
}

std::pair<SharedBuffers::Slab*, size_t> SharedBuffers::block_at(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto after = slabs_.upper_bound(address);
  if (after == slabs_.begin()) return {nullptr, 0};
  auto& [begin, slab] = *std::prev(after);
  if (address - begin >= slab.segment.bytes()) return {nullptr, 0};
  return {&slab, (address - begin) / slab.block_bytes};
}

// The buffer that begins at this address.
std::pair<SharedBuffers::Slab*, size_t> SharedBuffers::buffer_at(const void* data) {
  const auto [slab, index] = block_at(data);
  if (slab == nullptr || slab->blocks[index] != Block::used ||
      slab->segment.data() + index * slab->block_bytes != data) {
    throw Failure(Code::invalid, -1, "no shared buffer begins at this address");
  }
  return {slab, index};
}

}  // namespace shoal
