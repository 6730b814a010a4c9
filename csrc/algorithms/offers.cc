#include "algorithms/offers.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace shoal {

Offers::~Offers() {
  for (auto& [number, offer] : offers_) {
    if (offer.copy != nullptr) shared_buffers_.discard(offer.copy);
  }
}

void* Offers::copy(const void* data, size_t bytes) {
  if (bytes > largest_copy) return nullptr;
  const bool has_room = copied_bytes_.fetch_add(bytes) + bytes <= most_copied_bytes;
  const bool is_few = copies_.fetch_add(1) < most_copies;
  void* copy = nullptr;
  try {
    // Few sizes, so that the next message can use it again.
    if (has_room && is_few) copy = shared_buffers_.allocate(std::bit_ceil(bytes));
  } catch (const Failure&) {
    // No shared memory or no descriptor left: the message is sent without a copy.
  }
  if (copy == nullptr) {
    copied_bytes_.fetch_sub(bytes);
    copies_.fetch_sub(1);
    return nullptr;
  }
  std::memcpy(copy, data, bytes);
  return copy;
}

void Offers::give_back(void* copy, size_t bytes) {
  shared_buffers_.release(copy);
  copied_bytes_.fetch_sub(bytes);
  copies_.fetch_sub(1);
}

uint64_t Offers::add(Offer offer) {
  offers_.emplace(next_number_, std::move(offer));
  return next_number_++;
}

Offer* Offers::find(uint64_t number) {
  const auto found = offers_.find(number);
  return found == offers_.end() ? nullptr : &found->second;
}

void Offers::remove(uint64_t number) {
  const auto found = offers_.find(number);
  if (found == offers_.end()) return;
  if (found->second.copy != nullptr) give_back(found->second.copy, found->second.bytes);
  offers_.erase(found);
}

bool Offers::has_any_for(int peer) const {
  return std::any_of(offers_.begin(), offers_.end(), [&](const auto& entry) { return entry.second.peer == peer; });
}

void Offers::remove_uncopied() {
  std::erase_if(offers_, [](const auto& entry) { return entry.second.copy == nullptr; });
}

}  // namespace shoal
