// Vectors of a wanted number of lanes, in as many registers as they take. Compiled once for each instruction set.
//
// Files that include this are compiled once for each instruction set, into the namespace QUIRE_ISA. They use no templates of
// the standard library: a copy with AVX-512 in it could be the one that the linker keeps for everybody.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quire::QUIRE_ISA {

#define QUIRE_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <class Half>
struct Pair;

template <class V>
struct Lane {
  using Type = __typeof__(V{}[0]);
};
template <class Half>
struct Lane<Pair<Half>> : Lane<Half> {};
template <class V>
using LaneOf = typename Lane<V>::Type;

template <class V>
constexpr bool kIsPair = false;
template <class Half>
constexpr bool kIsPair<Pair<Half>> = true;

// All lanes the same.
template <class V>
QUIRE_INLINE V broadcast(LaneOf<V> value) {
  if constexpr (kIsPair<V>) {
    return {broadcast<decltype(V::low)>(value), broadcast<decltype(V::low)>(value)};
  } else {
    return value - V{};
  }
}

// A vector that is longer than a register, as two of half its length. The compiler's own vectors can be longer too, but GCC 12
// keeps such ones in memory, and compares, selects, converts and shuffles them lane by lane.
template <class Half>
struct Pair {
  Half low, high;

  Pair() = default;
  QUIRE_INLINE Pair(const Half& first, const Half& second) : low(first), high(second) {}
  QUIRE_INLINE Pair(LaneOf<Half> value) : Pair(broadcast<Pair>(value)) {}

  QUIRE_INLINE LaneOf<Half> operator[](int lane) const {
    constexpr int kCount = sizeof(Half) / sizeof(LaneOf<Half>);
    return lane < kCount ? low[lane] : high[lane - kCount];
  }

  QUIRE_INLINE Pair operator-() const { return {-low, -high}; }
  friend QUIRE_INLINE Pair operator<<(const Pair& a, int count) { return {a.low << count, a.high << count}; }
  friend QUIRE_INLINE Pair operator>>(const Pair& a, int count) { return {a.low >> count, a.high >> count}; }

#define QUIRE_BINARY(op, assign)                                                                                    \
  friend QUIRE_INLINE Pair operator op(const Pair& a, const Pair& b) { return {a.low op b.low, a.high op b.high}; } \
  QUIRE_INLINE Pair& operator assign(const Pair& b) { return *this = *this op b; }
  QUIRE_BINARY(+, +=)
  QUIRE_BINARY(-, -=)
  QUIRE_BINARY(*, *=)
  QUIRE_BINARY(/, /=)
  QUIRE_BINARY(&, &=)
  QUIRE_BINARY(|, |=)
#undef QUIRE_BINARY

  // Lanes are 0 or -1, in integers as wide as those that are compared.
#define QUIRE_COMPARISON(op)                                                                 \
  friend QUIRE_INLINE Pair<decltype(low op low)> operator op(const Pair& a, const Pair& b) { \
    return {a.low op b.low, a.high op b.high};                                               \
  }
  QUIRE_COMPARISON(<)
  QUIRE_COMPARISON(<=)
  QUIRE_COMPARISON(>)
  QUIRE_COMPARISON(>=)
  QUIRE_COMPARISON(==)
  QUIRE_COMPARISON(!=)
#undef QUIRE_COMPARISON
};

template <class T, int kCount, bool kFits = sizeof(T) * kCount <= kRegisterBytes>
struct VectorType {
  using Type __attribute__((vector_size(sizeof(T) * kCount))) = T;
};
template <class T, int kCount>
struct VectorType<T, kCount, false> {
  using Type = Pair<typename VectorType<T, kCount / 2>::Type>;
};
template <class T, int kCount>
using Vector = typename VectorType<T, kCount>::Type;

template <class V>
constexpr int kLanesOf = sizeof(V) / sizeof(LaneOf<V>);
template <class V>
using HalfOf = Vector<LaneOf<V>, kLanesOf<V> / 2>;

// -- bits --------------------------------------------------------------------------------------------------------------

// Bits of one vector type as another of the same size.
template <class To, class From>
QUIRE_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  if constexpr (kIsPair<To>) {
    return {bits_as<decltype(To::low)>(from.low), bits_as<decltype(To::low)>(from.high)};
  } else {
    return (To)from;  // a cast between vector types keeps the bits
  }
}

// A vector from memory at any address, and to it.
template <class V>
QUIRE_INLINE V load_bits(const void* from) {
  if constexpr (kIsPair<V>) {
    using Half = decltype(V::low);
    return {load_bits<Half>(from), load_bits<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    V result;
    std::memcpy(&result, from, sizeof result);
    return result;
  }
}

template <class V>
QUIRE_INLINE void store_bits(void* to, V vector) {
  if constexpr (kIsPair<V>) {
    store_bits(to, vector.low);
    store_bits(static_cast<char*>(to) + sizeof vector.low, vector.high);
  } else {
    std::memcpy(to, &vector, sizeof vector);
  }
}

// The half of a vector that begins with lane `kFirst`.
template <int kFirst, class V>
QUIRE_INLINE HalfOf<V> half_from(V vector) {
  constexpr int kCount = kLanesOf<V> / 2;
  if constexpr (kIsPair<V>) {
    return kFirst == 0 ? vector.low : vector.high;
  } else if constexpr (kCount == 8) {
    return __builtin_shufflevector(vector, vector, kFirst, kFirst + 1, kFirst + 2, kFirst + 3, kFirst + 4, kFirst + 5, kFirst + 6,
                                   kFirst + 7);
  } else if constexpr (kCount == 4) {
    return __builtin_shufflevector(vector, vector, kFirst, kFirst + 1, kFirst + 2, kFirst + 3);
  } else {
    static_assert(kCount == 2);
    return __builtin_shufflevector(vector, vector, kFirst, kFirst + 1);
  }
}

template <class V>
QUIRE_INLINE HalfOf<V> low_half(V vector) {
  return half_from<0>(vector);
}

template <class V>
QUIRE_INLINE HalfOf<V> high_half(V vector) {
  return half_from<kLanesOf<V> / 2>(vector);
}

// -- lane by lane --------------------------------------------------------------------------------------------------------

// `a` where the mask is -1, `b` where it is 0.
template <class Mask, class V>
QUIRE_INLINE V select(Mask mask, V a, V b) {
  if constexpr (kIsPair<V>) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  } else {
    return mask ? a : b;
  }
}

// `b` where one of the numbers is NaN.
template <class V>
QUIRE_INLINE V maximum(V a, V b) {
  return select(a > b, a, b);
}

template <class V>
QUIRE_INLINE V minimum(V a, V b) {
  return select(a < b, a, b);
}

// Calls visit(to, from) for the registers of two vectors of as many.
template <class To, class From, class Visit>
QUIRE_INLINE void for_each_register(To& to, const From& from, const Visit& visit) {
  if constexpr (kIsPair<To>) {
    for_each_register(to.low, from.low, visit);
    for_each_register(to.high, from.high, visit);
  } else {
    visit(to, from);
  }
}

// Numbers of one type as another, floats towards zero.
template <class To, class From>
QUIRE_INLINE To convert(From from) {
  if constexpr (kIsPair<To>) {
    return {convert<decltype(To::low)>(low_half(from)), convert<decltype(To::low)>(high_half(from))};
  } else {
    return __builtin_convertvector(from, To);
  }
}

}  // namespace quire::QUIRE_ISA
