// Rotary embedding with the write to the paged cache: one pass over a token's heads, quantised where the cache
// is. What is stored equals the reference bit for bit. And angles of any position, for models without a limit.
#include "../cpu/entry.h"
#include "../cpu/pool.h"
#include "../cpu/simd.h"

#include <algorithm>
#include <cmath>

namespace df {
namespace {

constexpr float kTiniest = 1e-10f;

// The first R of D numbers turned: i with i + R/2. cosine: R/2 of them, then the sines.
void turn(const bf16* x, const float* cosine, int64_t D, int64_t R, bf16* out) {
    const int64_t half = R / 2;
    const float* sine = cosine + half;
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const f32x16 a = load_bf16(x + i), b = load_bf16(x + i + half);
        const f32x16 c = load<f32x16>(cosine + i), s = load<f32x16>(sine + i);
        store_bf16(out + i, a * c - b * s);
        store_bf16(out + i + half, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = to_float(x[i]), b = to_float(x[i + half]);
        out[i] = to_bf16(a * cosine[i] - b * sine[i]);
        out[i + half] = to_bf16(b * cosine[i] + a * sine[i]);
    }
    if (out != x) std::copy(x + R, x + D, out + R);
}

struct Plain {
    typedef bf16 Number;
    static void store_row(const bf16* x, int64_t D, Number* out, float*) { std::copy(x, x + D, out); }
};

struct ToInt8 {
    static constexpr float kLimit = 127.0f;
    // at 1.5·2²³ the last bit of a float is one: the nearest integer, half to even
    static i32x16 bits(f32x16 x) { return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, i32x16); }
};

struct ToFp8 {
    static constexpr float kLimit = 448.0f;
    static i32x16 bits(f32x16 x) {
        const u32x16 all = (u32x16)x, magnitude = all & 0x7fffffff;
        // exponents rebiased from 127 to 7; three bits of the mantissa stay, rounded half to even
        const u32x16 normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
        // at 2¹⁴ the last bit of a float is 2⁻⁹, the step of the subnormal numbers
        const u32x16 subnormal = (u32x16)((f32x16)magnitude + 16384.0f) & 0xf;
        const u32x16 rounded = magnitude < 0x3c800000 ? subnormal : normal;
        return (i32x16)(rounded | ((all >> 24) & 0x80));
    }
};

// x ≈ number · scale, where the largest number is the format's
template <class F> struct Quantised {
    typedef int8_t Number;
    static void store_row(const bf16* x, int64_t D, Number* out, float* scale) {
        f32x16 largest = splat(kTiniest);
        for (int64_t d = 0; d < D; d += 16)
            largest = max16(largest, (f32x16)((u32x16)load_bf16(x + d) & 0x7fffffff));
        *scale = max_of(largest) / F::kLimit;
        for (int64_t d = 0; d < D; d += 16) store_bytes(out + d, F::bits(load_bf16(x + d) / splat(*scale)));
    }
};

struct Places {
    char* values;         // a layer's [2][kv_heads][block_size][D], every block_stride numbers
    float* scales;        // a layer's [kv_heads][2][block_size], every scale_stride floats
    const int64_t* slots;
    int64_t kv_heads, D, block_stride, scale_stride, block_size;
};

template <class F> void store_token(const Places& p, int64_t t, const bf16* keys_and_values) {
    typedef typename F::Number Number;
    const int64_t block = p.slots[t] / p.block_size, cell = p.slots[t] % p.block_size;
    for (int64_t kind = 0; kind < 2; kind++)
        for (int64_t h = 0; h < p.kv_heads; h++) {
            const int64_t row = (kind * p.kv_heads + h) * p.block_size + cell;
            Number* out = (Number*)p.values + block * p.block_stride + row * p.D;
            float* scale = p.scales + block * p.scale_stride + (h * 2 + kind) * p.block_size + cell;
            F::store_row(keys_and_values + (kind * p.kv_heads + h) * p.D, p.D, out, scale);
        }
}

}  // namespace
}  // namespace df

// Turns the query and key heads of qkv [T][heads + 2·kv_heads][D] in place by row rows[t] of cos_sin [..][R], and
// writes keys and values to their slots. q_sink [T][heads][D], unless null: the queries turned by sink_rows.
// format: 0 bf16, 1 int8, 2 e4m3. R <= D, R % 2 == 0, D % 16 == 0.
extern "C" void df_rotary_store(uint16_t* qkv, const float* cos_sin, const int64_t* rows, const int64_t* slots,
                                char* values, float* scales, const int64_t* sink_rows, uint16_t* q_sink,
                                int64_t T, int64_t heads, int64_t kv_heads, int64_t D, int64_t R, int64_t format,
                                int64_t block_stride, int64_t scale_stride, int64_t block_size) {
    using namespace df;
    const int64_t width = (heads + 2 * kv_heads) * D;
    const Places places{values, scales, slots, kv_heads, D, block_stride, scale_stride, block_size};
    const auto store_to = format == 0 ? store_token<Plain>
                        : format == 1 ? store_token<Quantised<ToInt8>> : store_token<Quantised<ToFp8>>;
    over_rows(T, width, [&](int64_t t) {
        bf16* x = qkv + t * width;
        if (q_sink)
            for (int64_t h = 0; h < heads; h++)
                turn(x + h * D, cos_sin + sink_rows[t] * R, D, R, q_sink + (t * heads + h) * D);
        for (int64_t h = 0; h < heads + kv_heads; h++) turn(x + h * D, cos_sin + rows[t] * R, D, R, x + h * D);
        store_to(places, t, x + heads * D);
    });
}
DF_RECORDABLE(df_rotary_store)

// out [T][2·half]: cosines, then sines, of positions[t]·inverse[i], in doubles, rounded once. Where span is
// not 0, T rows more: of min(positions[t], span - 1).
extern "C" void df_angles(const int64_t* positions, const double* inverse, float* out, int64_t T, int64_t half,
                          int64_t span) {
    df::over_rows(span ? 2 * T : T, 16 * half, [&](int64_t row) {
        const int64_t position = row < T ? positions[row] : std::min(positions[row - T], span - 1);
        float* cosine = out + row * 2 * half;
        for (int64_t i = 0; i < half; i++) {
            const double angle = (double)position * inverse[i];
            cosine[i] = (float)std::cos(angle);
            cosine[half + i] = (float)std::sin(angle);
        }
    });
}
DF_RECORDABLE(df_angles)
