// Products of a few vectors with a weight matrix on a CPU: y[m, n] = sum_k x[m, k] * w[n, k].
//
// With few rows of x such a product takes the time of reading w, if what is done with each number of w costs less than
// fetching it. So rows of w are read once, in order, widened in registers, and used for all rows of x at once.
//
// Integer weights meet x as 15-bit fixed point, which is finer than the bf16 that x comes in, relative to its largest
// number: two products and their sum are then one instruction.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t GRAIN = 64;       // rows of w that are worth a thread
constexpr int64_t ROWS = 4;         // rows of x that one pass over a row of w serves
constexpr int64_t EXACT = 512;      // products of 15 and 8 bits whose sum fits into 32 bits
constexpr int64_t GROUP = 64;       // int4 weights that share a scale
constexpr float LARGEST = 16383.0f; // of 15 bits

using Words = uint32_t __attribute__((vector_size(32)));
using Floats = float __attribute__((vector_size(32)));

template <class Vector>
inline Vector read(const void* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

inline float widened(at::BFloat16 value) { return static_cast<float>(value); }

inline float total(Floats lanes) {
  float sum = 0;
  for (int lane = 0; lane < 8; lane++) sum += lanes[lane];
  return sum;
}

// Calls body(M, m) so that M <= ROWS rows of x from m on are served by a loop compiled for M.
template <class Body>
inline void by_rows(int64_t rows, const Body& body) {
  for (int64_t m = 0; m < rows; m += ROWS) {
    switch (std::min(rows - m, ROWS)) {
      case 1: body(std::integral_constant<int, 1>(), m); break;
      case 2: body(std::integral_constant<int, 2>(), m); break;
      case 3: body(std::integral_constant<int, 3>(), m); break;
      default: body(std::integral_constant<int, 4>(), m); break;
    }
  }
}

void check(const at::Tensor& x, const at::Tensor& weight, int64_t width) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kBFloat16, "x must be [rows, in] in bf16");
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && x.size(1) == width, "weight must be [out, in]");
}

// Of each 16 numbers first the even ones, then the odd ones: as two halves of 32-bit words give them.
std::vector<float> even_odd(const at::Tensor& x) {
  const int64_t rows = x.size(0), width = x.size(1), whole = width / 16 * 16;
  const auto* from = x.const_data_ptr<at::BFloat16>();
  std::vector<float> split(rows * width);
  for (int64_t m = 0; m < rows; m++) {
    for (int64_t k = 0; k < whole; k += 16) {
      for (int64_t i = 0; i < 8; i++) {
        split[m * width + k + i] = widened(from[m * width + k + 2 * i]);
        split[m * width + k + 8 + i] = widened(from[m * width + k + 2 * i + 1]);
      }
    }
    for (int64_t k = whole; k < width; k++) split[m * width + k] = widened(from[m * width + k]);
  }
  return split;
}

// bf16 numbers are the upper halves of fp32 numbers.
template <int M>
inline void dot_bf16(const at::BFloat16* w, const float* x, int64_t width, float* sums) {
  Floats even[M] = {}, odd[M] = {};
  const int64_t whole = width / 16 * 16;
  for (int64_t k = 0; k < whole; k += 16) {
    __builtin_prefetch(reinterpret_cast<const char*>(w + k) + 512);
    const auto pair = read<Words>(w + k);
    const auto low = reinterpret_cast<Floats>(pair << 16), high = reinterpret_cast<Floats>(pair & 0xFFFF0000u);
    for (int m = 0; m < M; m++) {
      even[m] += low * read<Floats>(x + m * width + k);
      odd[m] += high * read<Floats>(x + m * width + k + 8);
    }
  }
  for (int m = 0; m < M; m++) {
    sums[m] = total(even[m] + odd[m]);
    for (int64_t k = whole; k < width; k++) sums[m] += widened(w[k]) * x[m * width + k];
  }
}

at::Tensor linear_bf16(const at::Tensor& x, const at::Tensor& weight) {
  check(x, weight, weight.size(1));
  const int64_t rows = x.size(0), out = weight.size(0), width = x.size(1);
  auto result = at::empty({rows, out}, x.options());
  const auto split = even_odd(x);
  const auto* w = weight.const_data_ptr<at::BFloat16>();
  auto* y = result.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, out, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      by_rows(rows, [&](auto number, int64_t m) {
        constexpr int M = decltype(number)::value;
        float sums[M];
        dot_bf16<M>(w + n * width, split.data() + m * width, width, sums);
        for (int i = 0; i < M; i++) y[(m + i) * out + n] = sums[i];
      });
    }
  });
  return result;
}

struct FixedPoint {
  std::vector<int16_t> values;
  std::vector<float> scales;  // of each row
};

FixedPoint fixed_point(const at::Tensor& x) {
  const int64_t rows = x.size(0), width = x.size(1);
  const auto* from = x.const_data_ptr<at::BFloat16>();
  FixedPoint fixed{std::vector<int16_t>(rows * width), std::vector<float>(rows)};
  for (int64_t m = 0; m < rows; m++) {
    float largest = 0;
    bool finite = true;
    for (int64_t k = 0; k < width; k++) {
      const float size = std::abs(widened(from[m * width + k]));
      finite = finite && size <= std::numeric_limits<float>::max();
      largest = std::max(largest, size);
    }
    fixed.scales[m] = finite ? largest / LARGEST : std::numeric_limits<float>::quiet_NaN();
    const float inverse = finite && largest > 0 ? LARGEST / largest : 0;
    if (!finite) continue;
    for (int64_t k = 0; k < width; k++) {
      fixed.values[m * width + k] = static_cast<int16_t>(std::lrint(widened(from[m * width + k]) * inverse));
    }
  }
  return fixed;
}

at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  check(x, weight, weight.size(1));
  TORCH_CHECK(scale.numel() == weight.size(0) && scale.scalar_type() == at::kFloat, "scale must be [out] in fp32");
  const int64_t rows = x.size(0), out = weight.size(0), width = x.size(1);
  auto result = at::empty({rows, out}, x.options());
  const auto fixed = fixed_point(x);
  const auto* w = weight.const_data_ptr<int8_t>();
  const auto* s = scale.const_data_ptr<float>();
  auto* y = result.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, out, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      for (int64_t m = 0; m < rows; m++) {
        float sum = 0;
        for (int64_t begun = 0; begun < width; begun += EXACT) {
          const int64_t stop = std::min(begun + EXACT, width);
          const int8_t* row = w + n * width;
          const int16_t* own = fixed.values.data() + m * width;
          int32_t part = 0;
          for (int64_t k = begun; k < stop; k++) part += static_cast<int16_t>(row[k]) * own[k];
          sum += static_cast<float>(part);
        }
        y[m * out + n] = sum * s[n] * fixed.scales[m];
      }
    }
  });
  return result;
}

// Byte i of a group's 32 holds number i in its low half and number i + 32 in its high half, each with 8 added.
at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  check(x, weight, weight.size(1) * 2);
  const int64_t rows = x.size(0), out = weight.size(0), width = x.size(1), groups = width / GROUP;
  TORCH_CHECK(width % GROUP == 0, "in must be a multiple of 64");
  TORCH_CHECK(scale.numel() == out * groups && scale.scalar_type() == at::kFloat && scale.is_contiguous(),
              "scale must be [out, in / 64] in fp32");
  auto result = at::empty({rows, out}, x.options());
  const auto fixed = fixed_point(x);
  std::vector<int32_t> eights(rows * groups);  // what the added 8 adds to each group's sum
  for (int64_t m = 0; m < rows; m++) {
    for (int64_t k = 0; k < width; k++) eights[m * groups + k / GROUP] += 8 * fixed.values[m * width + k];
  }
  const auto* w = weight.const_data_ptr<uint8_t>();
  const auto* s = scale.const_data_ptr<float>();
  auto* y = result.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, out, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      for (int64_t m = 0; m < rows; m++) {
        float sum = 0;
        for (int64_t g = 0; g < groups; g++) {
          const uint8_t* bytes = w + (n * groups + g) * (GROUP / 2);
          const int16_t* own = fixed.values.data() + m * width + g * GROUP;
          int32_t part = 0;
          for (int64_t i = 0; i < GROUP / 2; i++) part += static_cast<int16_t>(bytes[i] & 15) * own[i];
          for (int64_t i = 0; i < GROUP / 2; i++) part += static_cast<int16_t>(bytes[i] >> 4) * own[i + GROUP / 2];
          sum += static_cast<float>(part - eights[m * groups + g]) * s[n * groups + g];
        }
        y[m * out + n] = sum * fixed.scales[m];
      }
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY(llmstack, library) {
  library.def("linear_bf16(Tensor x, Tensor weight) -> Tensor");
  library.def("linear_int8(Tensor x, Tensor weight, Tensor scale) -> Tensor");
  library.def("linear_int4(Tensor x, Tensor weight, Tensor scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(llmstack, CPU, library) {
  library.impl("linear_bf16", linear_bf16);
  library.impl("linear_int8", linear_int8);
  library.impl("linear_int4", linear_int4);
}
