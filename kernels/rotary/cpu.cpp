// What models without a limit of length need of rotary embeddings: angles of any position, and queries turned
// a second time. Rows are independent.
#include "../cpu/entry.h"
#include "../cpu/pool.h"
#include "../cpu/simd.h"

#include <algorithm>
#include <cmath>

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

// out [T][heads][D]: the first `heads` heads of qkv [T][width], turned by rows[t] of cos_sin [rows][R].
extern "C" void df_turn_queries(const uint16_t* qkv, const float* cos_sin, const int64_t* rows, uint16_t* out,
                                int64_t T, int64_t heads, int64_t width, int64_t D, int64_t R) {
    using namespace df;
    const int64_t half = R / 2;
    over_rows(T, heads * D, [&](int64_t t) {
        const float* cosine = cos_sin + rows[t] * R;
        const float* sine = cosine + half;
        for (int64_t h = 0; h < heads; h++) {
            const bf16* x = qkv + t * width + h * D;
            bf16* y = out + (t * heads + h) * D;
            for (int64_t i = 0; i < half; i++) {
                const float a = to_float(x[i]), b = to_float(x[i + half]);
                y[i] = to_bf16(a * cosine[i] - b * sine[i]);
                y[i + half] = to_bf16(b * cosine[i] + a * sine[i]);
            }
            std::copy(x + R, x + D, y + R);
        }
    });
}
DF_RECORDABLE(df_turn_queries)
