// A collective over links, as one rank's table of steps: written by one function per algorithm, executed by
// `execute`, counted by `count`.
//
// Steps towards one peer happen in the order in which they are listed, and so do steps from one peer: both
// ranks list the same bytes in the same order (a link is a stream: where one rank cuts a region in two, the
// other need not). The steps of a rank on its own memory are a third such order. Beyond these orders the
// steps are free of each other, except for `after`, which names the step that must be complete before this
// one may start: a send of what is received first, a reduction that folds in a fixed order, memory that is
// used again. Large regions are cut into chunks, so that one chunk is sent on while the next is received.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

// `input` is only read; `output` and `scratch` are read and written.
enum class Space : uint8_t { input, output, scratch };

// The index of no step: "after nothing".
constexpr int no_step = -1;

struct Place {
  Space space = Space::output;
  size_t offset = 0;  // bytes
};

struct Region {
  Space space = Space::output;
  size_t offset = 0;  // bytes
  size_t bytes = 0;

  Place place() const { return {space, offset}; }
};

struct Step {
  enum class Kind : uint8_t {
    send,            // region -> peer
    receive,         // peer -> region
    receive_reduce,  // region = from (op) peer's, element by element; `from` may be the region itself
    copy,            // region = from
    fold,            // region = from[0] (op) from[1] (op) ...: `parts` of them, `stride` bytes apart
    wait,            // nothing: later steps on this rank's own memory start after `after`
  };
  Kind kind;
  int peer;  // -1: the last three kinds, which involve only this rank
  Region region;
  int after;  // index of an earlier step, or no_step
  Place from = {};
  int parts = 1;
  size_t stride = 0;
};

// The functions that add a step return its index, for the `after` of others. A step of no bytes is left out, and its
// `after` is returned instead: a step that would wait for it then waits for `after`.
struct Schedule {
  std::vector<Step> steps;
  size_t scratch_bytes = 0;  // how much scratch the steps use

  int send(int peer, Region region, int after) { return add({Step::Kind::send, peer, region, after}); }
  int receive(int peer, Region region, int after) { return add({Step::Kind::receive, peer, region, after}); }
  int receive_reduce(int peer, Region region, Place from, int after) {
    return add({Step::Kind::receive_reduce, peer, region, after, from});
  }
  int copy(Region region, Place from, int after) { return add({Step::Kind::copy, -1, region, after, from}); }
  int fold(Region region, Place from, int parts, size_t stride, int after) {
    return add({Step::Kind::fold, -1, region, after, from, parts, stride});
  }
  void wait(int after) {
    if (after != no_step) steps.push_back({Step::Kind::wait, -1, {}, after});
  }

 private:
  int add(const Step& step) {
    if (step.region.bytes == 0) return step.after;
    steps.push_back(step);
    return static_cast<int>(steps.size()) - 1;
  }
};

}  // namespace shoal
