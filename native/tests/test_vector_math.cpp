// exp, tanh, softplus and the normal distribution against the library in double, over all magnitudes. Compiled for each
// instruction set.
#include "vector_math.h"

#include <cmath>
#include <limits>

#include "check.h"

#define QUIRE_TEXT_OF(name) #name
#define QUIRE_TEXT(name) QUIRE_TEXT_OF(name)

using namespace quire;
using namespace quire::QUIRE_ISA;

// How far `got` is from `wanted`, in units of the last place of the nearest float.
double ulps(float got, double wanted) {
  const float nearest = std::fabs(static_cast<float>(wanted));
  const double unit = static_cast<double>(std::nextafter(nearest, std::numeric_limits<float>::infinity())) - nearest;
  return std::fabs(got - wanted) / unit;
}

// Not part of main(), which a CPU without the instructions must get through.
__attribute__((noinline)) void check_all() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (uint32_t bits = 0; bits < 0x7f800000u; bits += 4099) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      float x;
      const uint32_t signed_bits = bits | sign;
      std::memcpy(&x, &signed_bits, sizeof x);
      const float power = quire::QUIRE_ISA::exp(splat(x))[bits % kLanes];
      if (x > 88.73f) {
        CHECK(power == kInfinity, "exp(%.9g) = %.9g", x, power);
      } else if (x < -104.0f) {
        CHECK(power == 0.0f, "exp(%.9g) = %.9g", x, power);
      } else {
        CHECK(ulps(power, std::exp(static_cast<double>(x))) < 1.2, "exp(%.9g) = %.9g", x, power);
      }
      if (sign != 0) {
        const float rough = rough_exp2(splat(x))[bits % kLanes];
        const double exact = std::exp2(static_cast<double>(x));
        // Numbers below the least that is normalized have fewer bits.
        CHECK(x < -150.0f ? rough == 0.0f : std::fabs(rough - exact) <= 3e-6 * exact + 1.5e-45, "rough_exp2(%.9g) = %.9g", x,
              rough);
      }
      const float tangent = quire::QUIRE_ISA::tanh(splat(x))[bits % kLanes];
      CHECK(ulps(tangent, std::tanh(static_cast<double>(x))) < 1.4, "tanh(%.9g) = %.9g", x, tangent);
      const float tail = quire::QUIRE_ISA::normal_tail(splat(x))[bits % kLanes];
      const double exact_tail = std::erfc(std::fabs(static_cast<double>(x)) / std::sqrt(2.0)) / 2.0;
      CHECK(std::fabs(tail - exact_tail) < 6e-8, "normal_tail(%.9g) = %.9g", x, tail);
      const float plus = quire::QUIRE_ISA::softplus(splat(x))[bits % kLanes];
      const double exact = x > 700.0f ? x : std::log1p(std::exp(static_cast<double>(x)));
      CHECK(ulps(plus, exact) < 3.0, "softplus(%.9g) = %.9g", x, plus);
    }
  }
  CHECK(quire::QUIRE_ISA::exp(splat(0.0f))[0] == 1.0f, "exp(0)");
  CHECK(quire::QUIRE_ISA::exp(splat(-kInfinity))[0] == 0.0f, "exp(-inf)");
  CHECK(quire::QUIRE_ISA::exp(splat(kInfinity))[0] == kInfinity, "exp(inf)");
  CHECK(rough_exp2(splat(0.0f))[0] == 1.0f, "rough_exp2(0)");
  CHECK(rough_exp2(splat(-kInfinity))[0] == 0.0f, "rough_exp2(-inf)");
  CHECK(quire::QUIRE_ISA::tanh(splat(kInfinity))[0] == 1.0f, "tanh(inf)");
  CHECK(quire::QUIRE_ISA::normal_tail(splat(kInfinity))[0] == 0.0f, "normal_tail(inf)");
  CHECK(quire::QUIRE_ISA::softplus(splat(kInfinity))[0] == kInfinity, "softplus(inf)");
  CHECK(quire::QUIRE_ISA::softplus(splat(-kInfinity))[0] == 0.0f, "softplus(-inf)");
  const float nan = std::nanf("");
  CHECK(std::isnan(quire::QUIRE_ISA::exp(splat(nan))[0]), "exp(NaN)");
  CHECK(std::isnan(rough_exp2(splat(nan))[0]), "rough_exp2(NaN)");
  CHECK(std::isnan(quire::QUIRE_ISA::tanh(splat(nan))[0]), "tanh(NaN)");
  CHECK(std::isnan(quire::QUIRE_ISA::normal_tail(splat(nan))[0]), "normal_tail(NaN)");
  CHECK(std::isnan(quire::QUIRE_ISA::softplus(splat(nan))[0]), "softplus(NaN)");
}

int main() {
  if (find_kernels(QUIRE_TEXT(QUIRE_ISA)) == nullptr) {
    std::printf("this CPU has no " QUIRE_TEXT(QUIRE_ISA) "\n");
    return 0;
  }
  check_all();
}
