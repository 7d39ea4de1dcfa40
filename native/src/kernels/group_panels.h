// How panels of 4-bit weights lie in memory, see linear.h, and how they are fetched.
#pragma once

#include "linear.h"

namespace quire::QUIRE_ISA {

constexpr int kAheadBytes = 4096;                // how far ahead of its use a weight is fetched
constexpr int kOctet = 8;                        // inputs whose weights of 16 columns lie in one line
constexpr int kGroupHeader = kPanelColumns * 8;  // bytes of a group's scales and zeros

}  // namespace quire::QUIRE_ISA
