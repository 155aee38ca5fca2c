// Sixteen floats at a time, in GCC's vector extensions: AVX-512 where there is, narrower registers elsewhere.
// bf16 is the upper half of an fp32; rounding is to nearest even.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace df {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint16_t bf16;

template <class T> static inline T load(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}

template <class T> static inline void store(void* p, T v) { std::memcpy(p, &v, sizeof(T)); }

// written out: adding x to zeros would be an addition
static inline f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// one rounding, whatever the compiler makes of a*b+c elsewhere
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#ifdef __AVX512F__
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    f32x16 r;
    for (int i = 0; i < 16; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    return load<float>(&bits);
}

static inline bf16 to_bf16(float x) {
    uint32_t bits = load<uint32_t>(&x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline f32x16 load_bf16(const bf16* p) {
    return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}

static inline void store_bf16(bf16* p, f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 nan = (u32x16)((bits & 0x7fffffff) > 0x7f800000);
    rounded = (rounded & ~nan) | (((bits >> 16) | 0x40) & nan);
    store(p, __builtin_convertvector(rounded, u16x16));
}

// spelt out for AVX-512, where GCC makes sixteen conversions of one
static inline i32x16 integers(i8x16 v) {
#ifdef __AVX512F__
    return (i32x16)_mm512_cvtepi8_epi32((__m128i)v);
#else
    return __builtin_convertvector(v, i32x16);
#endif
}

// the low byte of each
static inline void store_bytes(void* p, i32x16 v) {
#ifdef __AVX512F__
    store(p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    store(p, __builtin_convertvector(v, i8x16));
#endif
}

static inline f32x16 widen(i8x16 v) { return __builtin_convertvector(integers(v), f32x16); }

// a pair of bf16 in each lane: the even and the odd one as floats
static inline f32x16 even(u32x16 pair) { return (f32x16)(pair << 16); }
static inline f32x16 odd(u32x16 pair) { return (f32x16)(pair & 0xffff0000u); }

static inline f32x16 max16(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// pairwise: lane order is fixed, so that the sum is
static inline float sum16(f32x16 v) {
    float x[16];
    store(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

static inline float max_of(f32x16 v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[16];
    store(x, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
#endif
}

// exp(x) for x <= 88; 0 below -87.3. Cody-Waite reduction and a degree-6 polynomial: within 2 ulp.
static inline f32x16 exp16(f32x16 x) {
    const f32x16 clamped = max16(x, splat(-87.3f));
    const f32x16 shifted = fma(clamped, splat(1.44269504f), splat(12582912.0f));
    const f32x16 n = shifted - 12582912.0f;
    f32x16 r = fma(n, splat(-0.693145752f), clamped);
    r = fma(n, splat(-1.42860677e-6f), r);
    f32x16 p = splat(1.0f / 720);
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    const i32x16 exponent = __builtin_convertvector(n, i32x16) << 23;
    const f32x16 value = (f32x16)((i32x16)p + exponent);
    return (f32x16)((i32x16)value & (x > -87.3f));
}

}  // namespace df
