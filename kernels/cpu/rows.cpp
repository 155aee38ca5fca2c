// The small operations between the products, one pass over memory each: norms and gate.
// Rows are independent; sums run in a fixed order.
#include "entry.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <cmath>

namespace df {
namespace {

f32x16 squares_of(const bf16* x, int64_t D) {
    f32x16 squares = {};
    for (int64_t d = 0; d < D; d += 16) {
        const f32x16 v = load_bf16(x + d);
        squares = fma(v, v, squares);
    }
    return squares;
}

float norm_factor(f32x16 squares, int64_t D, float eps) {
    return 1.0f / std::sqrt(sum16(squares) / (float)D + eps);
}

// act is x·sigmoid(argument(x))
template <class Argument>
void gate_mul(const bf16* gate_up, bf16* out, int64_t T, int64_t I, Argument argument) {
    over_rows(T, 2 * I, [&](int64_t t) {
        const bf16* gate = gate_up + t * 2 * I;
        for (int64_t i = 0; i < I; i += 16) {
            const f32x16 g = load_bf16(gate + i);
            const f32x16 act = g / (exp16(-max16(argument(g), splat(-87.0f))) + 1.0f);
            store_bf16(out + t * I + i, act * load_bf16(gate + I + i));
        }
    });
}

}  // namespace
}  // namespace df

// out[t] = float(table[tokens[t] - first])·scale, zeros where the table of V rows has none. D % 16 == 0.
extern "C" void df_embed(const int64_t* tokens, const uint16_t* table, float* out, int64_t T, int64_t D,
                         int64_t first, int64_t V, float scale) {
    using namespace df;
    over_rows(T, D, [&](int64_t t) {
        const int64_t place = tokens[t] - first;
        const bf16* row = place >= 0 && place < V ? table + place * D : nullptr;
        for (int64_t d = 0; d < D; d += 16)
            store(out + t * D + d, row ? load_bf16(row + d) * scale : splat(0.0f));
    });
}
DF_RECORDABLE(df_embed)

// residual (fp32) += x in place, unless x is null; out = norm(residual)·(w + offset). D % 16 == 0.
extern "C" void df_add_rms_norm(const uint16_t* x, float* residual, const uint16_t* w, uint16_t* out,
                                int64_t rows, int64_t D, float eps, float offset) {
    using namespace df;
    over_rows(rows, D, [&](int64_t row) {
        float* sum = residual + row * D;
        f32x16 squares = {};
        for (int64_t d = 0; d < D; d += 16) {
            f32x16 v = load<f32x16>(sum + d);
            if (x) store(sum + d, v += load_bf16(x + row * D + d));
            squares = fma(v, v, squares);
        }
        const float scale = norm_factor(squares, D, eps);
        for (int64_t d = 0; d < D; d += 16)
            store_bf16(out + row * D + d, load<f32x16>(sum + d) * scale * (load_bf16(w + d) + offset));
    });
}
DF_RECORDABLE(df_add_rms_norm)

// residual (fp32) += norm(x)·(w + offset), in place. D % 16 == 0.
extern "C" void df_norm_add(const uint16_t* x, float* residual, const uint16_t* w, int64_t rows, int64_t D,
                            float eps, float offset) {
    using namespace df;
    over_rows(rows, D, [&](int64_t row) {
        const bf16* own = x + row * D;
        const float scale = norm_factor(squares_of(own, D), D, eps);
        float* sum = residual + row * D;
        for (int64_t d = 0; d < D; d += 16)
            store(sum + d, load<f32x16>(sum + d) + load_bf16(own + d) * scale * (load_bf16(w + d) + offset));
    });
}
DF_RECORDABLE(df_norm_add)

// The first `normed` heads of x [T][heads][D], each divided by its norm, times its row of w [normed][D] plus
// offset, in place. D % 16 == 0.
extern "C" void df_norm_heads(uint16_t* x, const uint16_t* w, int64_t T, int64_t heads, int64_t normed,
                              int64_t D, float eps, float offset) {
    using namespace df;
    over_rows(T, normed * D, [&](int64_t t) {
        for (int64_t h = 0; h < normed; h++) {
            bf16* own = x + (t * heads + h) * D;
            const float scale = norm_factor(squares_of(own, D), D, eps);
            for (int64_t d = 0; d < D; d += 16)
                store_bf16(own + d, load_bf16(own + d) * scale * (load_bf16(w + h * D + d) + offset));
        }
    });
}
DF_RECORDABLE(df_norm_heads)

// out [T][I] = silu(gate)·up, gate_up [T][2·I]. I % 16 == 0.
extern "C" void df_silu_mul(const uint16_t* gate_up, uint16_t* out, int64_t T, int64_t I) {
    df::gate_mul(gate_up, out, T, I, [](df::f32x16 g) { return g; });
}
DF_RECORDABLE(df_silu_mul)

// The same with gelu in its tanh form: (1 + tanh u) / 2 is sigmoid(2u), with u = √(2/π)·(g + 0.044715·g³).
extern "C" void df_gelu_tanh_mul(const uint16_t* gate_up, uint16_t* out, int64_t T, int64_t I) {
    df::gate_mul(gate_up, out, T, I, [](df::f32x16 g) {
        return 1.5957691216f * g * (0.044715f * g * g + 1.0f);
    });
}
DF_RECORDABLE(df_gelu_tanh_mul)
