// Linear layer: y = x·Wᵀ (+ bias), x in bf16, W in bf16 or int8 with a scale per output. See panels.h.
#include "../cpu/entry.h"
#include "panels.h"

#include <algorithm>


extern "C" void df_pack_linear(const uint16_t* w, int64_t N, int64_t K, uint32_t* packed) {
    const int64_t pairs = (K + 1) / 2, count = (N + 15) / 16;
    for (int64_t panel = 0; panel < count; panel++)
        for (int64_t k = 0; k < pairs; k++)
            for (int64_t lane = 0; lane < 16; lane++) {
                const int64_t n = panel * 16 + lane;
                const uint32_t low = n < N ? w[n * K + 2 * k] : 0;
                const uint32_t high = n < N && 2 * k + 1 < K ? w[n * K + 2 * k + 1] : 0;
                packed[(panel * pairs + k) * 16 + lane] = high << 16 | low;
            }
}
DF_RECORDABLE(df_pack_linear)

extern "C" void df_pack_linear_int8(const int8_t* w, int64_t N, int64_t K, int8_t* packed) {
    const int64_t padded = (K + 1) / 2 * 2, count = (N + 15) / 16;
    for (int64_t panel = 0; panel < count; panel++)
        for (int64_t k = 0; k < padded; k++)
            for (int64_t lane = 0; lane < 16; lane++) {
                const int64_t n = panel * 16 + lane;
                packed[(panel * padded + k) * 16 + lane] = n < N && k < K ? w[n * K + k] : 0;
            }
}
DF_RECORDABLE(df_pack_linear_int8)

// scale: fp32 [N] where w is int8, null where it is bf16.
extern "C" void df_linear(const uint16_t* x, const void* w, const float* scale, const uint16_t* bias, void* y,
                          int64_t T, int64_t N, int64_t K, int fp32_out) {
    using namespace df;
    const int64_t pairs = (K + 1) / 2, count = (N + kLanes - 1) / kLanes;
    static thread_local std::vector<float> widened;
    widened.resize(T * pairs * 2);
    float* wide = widened.data();
    over_rows(T, K, [&](int64_t t) { widen_row(x + t * K, K, wide + t * pairs * 2); });
    const Problem p{wide,          (const char*)w, scale, bias, fp32_out ? nullptr : (bf16*)y,
                    fp32_out ? (float*)y : nullptr, T,     N,    pairs};
    // chunks are multiples of the widest tile, so that none is cut short at a border
    const int64_t wanted = (count + threads() * 4 - 1) / (threads() * 4);
    const int64_t step = (wanted + 23) / 24 * 24 > wanted * 2 ? (wanted + 7) / 8 * 8 : (wanted + 23) / 24 * 24;
    parallel((int)((count + step - 1) / step), [&](int chunk) {
        const int64_t first = chunk * step, end = std::min<int64_t>(count, first + step);
        if (scale) range<Int8>(p, first, end);
        else range<Bf16>(p, first, end);
    });
}
DF_RECORDABLE(df_linear)
