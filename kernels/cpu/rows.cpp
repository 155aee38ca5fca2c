// The small operations between the products, one pass over memory each: norms, rotary with KV write, gate.
// Rows are independent; sums run in a fixed order.
#include "entry.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <cmath>

// out[t] = float(table[tokens[t]]). D % 16 == 0.
extern "C" void df_embed(const int64_t* tokens, const uint16_t* table, float* out, int64_t T, int64_t D) {
    using namespace df;
    over_rows(T, D, [&](int64_t t) {
        for (int64_t d = 0; d < D; d += 16) store(out + t * D + d, load_bf16(table + tokens[t] * D + d));
    });
}
DF_RECORDABLE(df_embed)

// residual (fp32) += x in place, unless x is null; out = norm(residual)·w. D % 16 == 0.
extern "C" void df_add_rms_norm(const uint16_t* x, float* residual, const uint16_t* w, uint16_t* out,
                                int64_t rows, int64_t D, float eps) {
    using namespace df;
    over_rows(rows, D, [&](int64_t row) {
        float* sum = residual + row * D;
        f32x16 squares = {};
        for (int64_t d = 0; d < D; d += 16) {
            f32x16 v = load<f32x16>(sum + d);
            if (x) store(sum + d, v += load_bf16(x + row * D + d));
            squares = fma(v, v, squares);
        }
        const float scale = 1.0f / std::sqrt(sum16(squares) / (float)D + eps);
        for (int64_t d = 0; d < D; d += 16)
            store_bf16(out + row * D + d, load<f32x16>(sum + d) * scale * load_bf16(w + d));
    });
}
DF_RECORDABLE(df_add_rms_norm)

// Rotates the query and key heads of qkv [T][heads + 2·kv_heads][D] in place, and writes keys and values to
// their slots of kv [blocks][layers][2][kv_heads][block_size][D]. cos_sin: [positions][R], R <= D, R % 2 == 0.
extern "C" void df_rotary_store(uint16_t* qkv, const float* cos_sin, const int64_t* positions,
                                const int64_t* slots, uint16_t* kv, int64_t T, int64_t heads, int64_t kv_heads,
                                int64_t D, int64_t R, int64_t layer, int64_t layers, int64_t block_size) {
    using namespace df;
    const int64_t half = R / 2, width = (heads + 2 * kv_heads) * D;
    const int64_t plane = kv_heads * block_size * D, block = layers * 2 * plane;
    over_rows(T, width, [&](int64_t t) {
        const float* cosine = cos_sin + positions[t] * R;
        const float* sine = cosine + half;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            bf16* x = qkv + t * width + h * D;
            for (int64_t i = 0; i < half; i++) {
                const float a = to_float(x[i]), b = to_float(x[i + half]);
                x[i] = to_bf16(a * cosine[i] - b * sine[i]);
                x[i + half] = to_bf16(b * cosine[i] + a * sine[i]);
            }
        }
        bf16* slab = kv + slots[t] / block_size * block + layer * 2 * plane + slots[t] % block_size * D;
        const bf16* k = qkv + t * width + heads * D;
        for (int64_t h = 0; h < kv_heads; h++) {
            std::copy(k + h * D, k + (h + 1) * D, slab + h * block_size * D);
            std::copy(k + (kv_heads + h) * D, k + (kv_heads + h + 1) * D, slab + plane + h * block_size * D);
        }
    });
}
DF_RECORDABLE(df_rotary_store)

// out [T][I] = silu(gate)·up, gate_up [T][2·I]. I % 16 == 0.
extern "C" void df_silu_mul(const uint16_t* gate_up, uint16_t* out, int64_t T, int64_t I) {
    using namespace df;
    over_rows(T, 2 * I, [&](int64_t t) {
        const bf16* gate = gate_up + t * 2 * I;
        for (int64_t i = 0; i < I; i += 16) {
            const f32x16 g = load_bf16(gate + i);
            store_bf16(out + t * I + i, g / (exp16(-max16(g, splat(-87.0f))) + 1.0f) * load_bf16(gate + I + i));
        }
    });
}
DF_RECORDABLE(df_silu_mul)
