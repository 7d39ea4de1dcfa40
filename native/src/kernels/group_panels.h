// How panels of weights in groups lie in memory, see linear.h, and how they are fetched.
#pragma once

#include "linear.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int kAheadBytes = 4096;                // how far ahead of its use a weight is fetched
constexpr int kGroupHeader = kPanelColumns * 4;  // bytes of a group's scales and zeros

// What a group's sums of products become: scale * (sum - zero * sum of the inputs), of half the columns of a panel.
struct GroupScale {
  f32x16 scale, zero;

  GroupScale(const char* group, int half) {
    const fp16* scales = reinterpret_cast<const fp16*>(group) + half * kLanes;
    scale = load(scales);
    zero = load(scales + kPanelColumns);
  }
  QUIRE_INLINE f32x16 of(f32x16 sum, float inputs) const { return scale * (sum - zero * inputs); }
};

QUIRE_INLINE const float* units_of(const PackedWeight& weight, const char* panel) {
  return reinterpret_cast<const float*>(panel + weight.panel_bytes()) - kPanelColumns;
}

}  // namespace quire::QUIRE_ISA
