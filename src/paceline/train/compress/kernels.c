/* Fused encoders and decoders for CPUs: one pass over memory each. `reference.py` says the same in torch, and tests hold the two
 * together bit for bit (sums excepted, whose order differs).
 *
 * Codes lie in streams: with w codes to a byte and m bytes, code j of byte i belongs to element j m + i, so that loops over i read and
 * write whole vectors. Ranges [lo, hi) are of bytes where codes are packed, of elements elsewhere: threads share the work by them.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define BLOCK 512
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* murmur3's finaliser: a counter in, 32 well mixed bits out */
static inline uint32_t mix(uint32_t h) {
    h ^= h >> 16; h *= 0x85ebca6bu;
    h ^= h >> 13; h *= 0xc2b2ae35u;
    return h ^ (h >> 16);
}

/* 23 bits as a float in [0, 1) */
static inline float uniform(uint32_t counter) {
    uint32_t bits = 0x3f800000u | (mix(counter) >> 9);
    float f;
    memcpy(&f, &bits, 4);
    return f - 1.0f;
}

/* sum of squares and largest magnitude; a NaN makes both NaN */
API void moments(const float *restrict x, int64_t lo, int64_t hi, double *restrict out) {
    double squares = 0;
    float largest = 0;
    int bad = 0;
    for (int64_t start = lo; start < hi; start += 4096) {
        int64_t end = MIN(start + 4096, hi);
        float q = 0;
        #pragma omp simd reduction(+ : q) reduction(max : largest) reduction(| : bad) simdlen(32)
        for (int64_t i = start; i < end; i++) {
            float a = fabsf(x[i]);
            q += a * a;
            largest = a > largest ? a : largest;
            bad |= !(a <= FLT_MAX);
        }
        squares += q;
    }
    out[0] = bad ? NAN : squares;
    out[1] = bad ? NAN : largest;
}

/* ---- TernGrad: trits, five to a byte */

static inline int32_t trit(float x, float scale, uint32_t counter) {
    int32_t hit = uniform(counter) * scale < fabsf(x);
    return (x < 0 ? -hit : hit) + 1;
}

API void ternary_encode(const float *restrict x, int64_t n, int64_t lo, int64_t hi, float scale, uint32_t seed, uint8_t *restrict out) {
    int64_t m = (n + 4) / 5, full = MAX(lo, MIN(hi, n - 4 * m));
    uint32_t step = (uint32_t)m;
    const float *b = x + m, *c = b + m, *d = c + m, *e = d + m;
    for (int64_t i = lo; i < full; i++) {
        uint32_t k = (uint32_t)i + seed;
        out[i] = trit(x[i], scale, k) + 3 * trit(b[i], scale, k + step) + 9 * trit(c[i], scale, k + 2 * step)
                 + 27 * trit(d[i], scale, k + 3 * step) + 81 * trit(e[i], scale, k + 4 * step);
    }
    for (int64_t i = full; i < hi; i++) {
        int32_t code = 0, weight = 1;
        for (int64_t p = i; p < 5 * m; p += m, weight *= 3)
            code += weight * (p < n ? trit(x[p], scale, (uint32_t)p + seed) : 1);
        out[i] = code;
    }
}

/* whose trits plus one a byte can hold the sum of */
#define RANKS 127
/* divides a byte by 3 */
#define THIRD(v) ((uint16_t)((uint16_t)((v) * 171u) >> 9))

/* adds trits plus one to sums that are bytes. By itself: compilers would merge the loop over ranks into it, and not find vectors then */
static __attribute__((noinline)) void trits_add(const uint8_t *restrict codes, int64_t count, uint8_t (*restrict sums)[BLOCK]) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t v = codes[i], v1 = THIRD(v), v2 = THIRD(v1), v3 = THIRD(v2), v4 = THIRD(v3);
        sums[0][i] += (uint8_t)(v - 3 * v1);
        sums[1][i] += (uint8_t)(v1 - 3 * v2);
        sums[2][i] += (uint8_t)(v2 - 3 * v3);
        sums[3][i] += (uint8_t)(v3 - 3 * v4);
        sums[4][i] += (uint8_t)v4;
    }
}

/* the sum over ranks of factor times trit; with `shared`, one factor times the sum of trits, which are added up as bytes */
API void ternary_decode(const uint8_t *const *restrict in, int64_t world, const float *restrict factors, int shared, int64_t n, int64_t lo,
                        int64_t hi, float *restrict out) {
    int64_t m = (n + 4) / 5;
    uint8_t trits[5][BLOCK];
    float sums[5][BLOCK];
    for (int64_t start = lo; start < hi; start += BLOCK) {
        int64_t count = MIN(BLOCK, hi - start);
        if (shared && world <= RANKS) {
            memset(trits, 0, sizeof trits);
            for (int64_t r = 0; r < world; r++) trits_add(in[r] + start, count, trits);
            for (int j = 0; j < 5; j++) {
                int64_t at = j * m + start, room = MIN(count, n - at);
                for (int64_t i = 0; i < room; i++) out[at + i] = factors[0] * (float)((int32_t)trits[j][i] - (int32_t)world);
            }
            continue;
        }
        memset(sums, 0, sizeof sums);
        for (int64_t first = 0; first < world;) {
            int64_t ranks = shared ? MIN(RANKS, world - first) : 1;
            memset(trits, 0, sizeof trits);
            for (int64_t r = first; r < first + ranks; r++) trits_add(in[r] + start, count, trits);
            float f = shared ? 1.0f : factors[first];
            for (int j = 0; j < 5; j++)
                for (int64_t i = 0; i < count; i++) sums[j][i] += f * (float)((int32_t)trits[j][i] - (int32_t)ranks);
            first += ranks;
        }
        for (int j = 0; j < 5; j++) {
            int64_t at = j * m + start, room = MIN(count, n - at);
            if (shared)
                for (int64_t i = 0; i < room; i++) out[at + i] = factors[0] * sums[j][i];
            else if (room > 0)
                memcpy(out + at, sums[j], room * sizeof(float));
        }
    }
}

/* ---- signs, eight to a byte; a set bit is a negative element */

/* with `error`, error += gain * x first, and signs are the error's. Sums of the magnitudes of either side, and how many are negative */
API void sign_encode(const float *restrict x, float *restrict error, float gain, int64_t n, int64_t lo, int64_t hi, uint8_t *restrict out,
                     double *restrict sums) {
    int64_t m = (n + 7) / 8;
    double positive = 0, negative = 0, count = 0;
    for (int64_t start = lo; start < hi; start += BLOCK) {
        int64_t end = MIN(start + BLOCK, hi);
        uint8_t packed[BLOCK] = {0};
        for (int j = 0; j < 8; j++) {
            int64_t at = j * m + start, room = MIN(end - start, n - at);
            float p = 0, q = 0;
            int32_t c = 0;
            #define PACK(value) \
                _Pragma("omp simd reduction(+ : p, q, c) simdlen(16)") \
                for (int64_t i = 0; i < room; i++) { \
                    float v = (value); \
                    int32_t bit = v < 0; \
                    p += bit ? 0.0f : v; \
                    q += bit ? v : 0.0f; \
                    c += bit; \
                    packed[i] |= (uint8_t)(bit << j); \
                }
            if (error) {
                float *restrict e = error + at;
                const float *restrict g = x + at;
                PACK(e[i] = e[i] + gain * g[i])
            } else {
                const float *restrict g = x + at;
                PACK(g[i])
            }
            #undef PACK
            positive += p; negative += q; count += c;
        }
        memcpy(out + start, packed, end - start);
    }
    sums[0] = positive; sums[1] = negative; sums[2] = count;
}

/* error -= what its sign decodes to */
API void sign_feedback(float *restrict error, int64_t lo, int64_t hi, float positive, float negative) {
    for (int64_t i = lo; i < hi; i++) error[i] -= error[i] < 0 ? negative : positive;
}

/* the sum over ranks of positive[r] or negative[r]; with `vote`, the sign of that sum times `magnitude` */
API void sign_decode(const uint8_t *const *restrict in, int64_t world, const float *restrict positive, const float *restrict negative,
                     int vote, float magnitude, int64_t n, int64_t lo, int64_t hi, float *restrict out) {
    int64_t m = (n + 7) / 8;
    for (int64_t start = lo; start < hi; start += BLOCK)
        for (int j = 0; j < 8; j++) {
            float sums[BLOCK] = {0};
            int64_t at = j * m + start, room = MIN(MIN(BLOCK, hi - start), n - at);
            for (int64_t r = 0; r < world; r++) {
                const uint8_t *restrict codes = in[r] + start;
                float p = positive[r], q = negative[r];
                for (int64_t i = 0; i < room; i++) sums[i] += (codes[i] >> j) & 1 ? q : p;
            }
            if (vote)
                for (int64_t i = 0; i < room; i++) sums[i] = magnitude * (float)((sums[i] > 0) - (sums[i] < 0));
            if (room > 0) memcpy(out + at, sums, room * sizeof(float));
        }
}

/* ---- QSGD: a norm per bucket, codes of 2, 4 or 8 bits; lo and hi are buckets */

API void qsgd_encode(const float *restrict x, int64_t n, int64_t bucket, int bits, int l2, int64_t lo, int64_t hi, uint32_t seed,
                     float *restrict norms, uint8_t *restrict out) {
    int32_t levels = (1 << (bits - 1)) - 1, per = 8 / bits;
    for (int64_t b = lo; b < hi; b++) {
        int64_t first = b * bucket, size = MIN(bucket, n - first), m = (size + per - 1) / per;
        const float *restrict v = x + first;
        uint8_t *restrict codes = out + b * (bucket / per);
        double sums[2];
        moments(v, 0, size, sums);
        float norm = norms[b] = l2 ? sqrtf((float)sums[0]) : (float)sums[1];
        float rate = norm > 0 ? (float)levels / norm : 0.0f;
        memset(codes, 0, m);
        for (int32_t j = 0; j < per; j++) {
            int64_t at = j * m, room = MIN(m, size - at);
            uint32_t counter = (uint32_t)(first + at) + seed;
            for (int64_t i = 0; i < room; i++) {
                float value = v[at + i];
                int32_t level = (int32_t)(fabsf(value) * rate + uniform(counter + (uint32_t)i));
                level = MIN(level, levels) | (value < 0 ? levels + 1 : 0);
                codes[i] |= (uint8_t)(level << (j * bits));
            }
        }
    }
}

/* the sum over ranks of what was encoded, each divided by `ranks` */
API void qsgd_decode(const uint8_t *const *restrict in, const float *const *restrict norms, int64_t world, float ranks, int64_t n,
                     int64_t bucket, int bits, int64_t lo, int64_t hi, float *restrict out) {
    int32_t levels = (1 << (bits - 1)) - 1, per = 8 / bits, mask = (1 << bits) - 1;
    for (int64_t b = lo; b < hi; b++) {
        int64_t first = b * bucket, size = MIN(bucket, n - first), m = (size + per - 1) / per;
        memset(out + first, 0, size * sizeof(float));
        for (int64_t r = 0; r < world; r++) {
            const uint8_t *restrict codes = in[r] + b * (bucket / per);
            float unit = norms[r][b] / ((float)levels * ranks);
            for (int32_t j = 0; j < per; j++) {
                int64_t at = j * m, room = MIN(m, size - at);
                float *restrict o = out + first + at;
                for (int64_t i = 0; i < room; i++) {
                    int32_t code = (codes[i] >> (j * bits)) & mask, level = code & levels;
                    o[i] += unit * (float)(code > levels ? -level : level);
                }
            }
        }
    }
}

/* ---- sparse: accumulate, select, and indices in Elias-Fano code */

/* total += gain * x, or, with `velocity`, momentum first. Indices whose total is not below the threshold in magnitude (NaN included) go to
 * `found`, ascending, up to `room` of them; returns how many there are */
API int64_t accumulate(const float *restrict x, float gain, float *restrict velocity, float momentum, int nesterov, float *restrict total,
                       int64_t n, float threshold, int32_t *restrict found, int64_t room) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t size = MIN(BLOCK, n - start);
        float *restrict t = total + start;
        const float *restrict g = x ? x + start : 0;
        if (g && velocity) {
            float *restrict u = velocity + start;
            if (nesterov)
                for (int64_t i = 0; i < size; i++) { float v = gain * g[i]; u[i] = momentum * (u[i] + v); t[i] += u[i] + v; }
            else
                for (int64_t i = 0; i < size; i++) { u[i] = momentum * u[i] + gain * g[i]; t[i] += u[i]; }
        } else if (g) {
            for (int64_t i = 0; i < size; i++) t[i] += gain * g[i];
        }
        /* few pass: whole vectors are looked at first, then without a branch, which would be guessed wrong */
        for (int64_t at = 0; at < size; at += 32) {
            int64_t end = MIN(at + 32, size);
            int any = 0;
            #pragma omp simd reduction(| : any)
            for (int64_t i = at; i < end; i++) any |= !(fabsf(t[i]) < threshold);
            if (!any) continue;
            if (count + 32 <= room)
                for (int64_t i = at; i < end; i++) {
                    found[count] = (int32_t)(start + i);
                    count += !(fabsf(t[i]) < threshold);
                }
            else
                for (int64_t i = at; i < end; i++)
                    if (!(fabsf(t[i]) < threshold)) {
                        if (count < room) found[count] = (int32_t)(start + i);
                        count++;
                    }
        }
    }
    return count;
}

/* orders by magnitude, NaN above all */
static inline uint32_t key(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits & 0x7fffffffu;
}

/* the k-th largest of `count` keys; `equal`: how many of those that are equal to it are among the k */
static uint32_t kth_largest(const uint32_t *restrict keys, int64_t count, int64_t k, int64_t *restrict equal) {
    uint32_t kth = 0, known = 0;
    for (int shift = 21; shift >= 0; shift = shift ? MAX(0, shift - 11) : -1) {
        uint32_t digits = shift ? 2047u : 1023u, digit = digits;
        int32_t having[2048] = {0};
        for (int64_t i = 0; i < count; i++)
            if ((keys[i] & known) == kth) having[keys[i] >> shift & digits]++;
        for (; having[digit] < k; digit--) k -= having[digit];
        kth |= digit << shift;
        known |= digits << shift;
    }
    *equal = k;
    return kth;
}

/* the `wanted`-th largest magnitude of every `stride`-th total as `accumulate` would make it; nothing is changed. `keys` is room */
API float threshold(const float *restrict x, float gain, const float *restrict velocity, float momentum, int nesterov,
                    const float *restrict total, int64_t n, int64_t stride, int64_t wanted, uint32_t *restrict keys) {
    int64_t count = 0, equal, ahead = 32 * stride; /* no two are in one line of the cache: each is a wait unless it was asked for before */
    for (int64_t i = 0; i < n; i += stride) {
        if (i + ahead < n) {
            __builtin_prefetch(x + i + ahead);
            __builtin_prefetch(total + i + ahead);
            if (velocity) __builtin_prefetch(velocity + i + ahead);
        }
        float v = gain * x[i];
        if (velocity) v = nesterov ? momentum * (velocity[i] + v) + v : momentum * velocity[i] + v;
        keys[count++] = key(total[i] + v);
    }
    uint32_t bits = kth_largest(keys, count, wanted, &equal);
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

/* Of `count` places, ascending (or of the first `count` elements, where none are given), takes away the k totals that are largest in magnitude,
 * of equal ones the first; velocities there, if given, become zero. Places go in Elias-Fano code. `keys` is room */
API void sparse_encode(float *restrict total, float *restrict velocity, const int64_t *restrict places, int64_t count, int64_t k, int low,
                       uint32_t *restrict keys, float *restrict values, int64_t low_bytes, uint8_t *restrict lows, int64_t high_bytes,
                       uint8_t *restrict highs) {
    int64_t equal;
    for (int64_t i = 0; i < count; i++) keys[i] = key(total[places ? places[i] : i]);
    uint32_t kth = kth_largest(keys, count, k, &equal);
    memset(lows, 0, low_bytes);
    memset(highs, 0, high_bytes);
    for (int64_t i = 0, j = 0; j < k; i++) {
        if (keys[i] < kth || (keys[i] == kth && equal-- <= 0)) continue;
        int64_t at = places ? places[i] : i, unary = (at >> low) + j;
        values[j] = total[at];
        total[at] -= values[j]; /* what is not finite leaves NaN behind */
        if (velocity) velocity[at] = 0;
        uint64_t bits = (uint64_t)(at & (((int64_t)1 << low) - 1)) << (j * low & 7);
        for (uint8_t *byte = lows + (j * low >> 3); bits; bits >>= 8) *byte++ |= (uint8_t)bits;
        highs[unary >> 3] |= (uint8_t)(1 << (unary & 7));
        j++;
    }
}

/* eight bytes, or as many as there are, the first lowest */
static inline uint64_t eight(const uint8_t *from, int64_t room) {
    uint64_t word = 0;
    if (room >= 8) memcpy(&word, from, 8);
    else for (int64_t i = 0; i < room; i++) word |= (uint64_t)from[i] << (8 * i);
    return word;
}

/* adds `factor` times the k values of each rank at the places sent with them; returns how many ranks' places are whole and below n, and stops
 * at the first whose are not */
API int64_t sparse_decode(const float *const *restrict values, const uint8_t *const *restrict lows, const uint8_t *const *restrict highs,
                          int64_t world, int64_t low_bytes, int64_t high_bytes, int64_t k, int low, float factor, int64_t n, float *restrict out) {
    for (int64_t r = 0; r < world; r++) {
        int64_t j = 0;
        for (int64_t byte = 0; byte < high_bytes && j < k; byte += 8)
            for (uint64_t word = eight(highs[r] + byte, high_bytes - byte); word && j < k; word &= word - 1, j++) {
                int64_t from = j * low >> 3;
                uint64_t rest = eight(lows[r] + from, low_bytes - from) >> (j * low & 7) & (((uint64_t)1 << low) - 1);
                int64_t at = ((byte * 8 + __builtin_ctzll(word) - j) << low) | (int64_t)rest;
                if (at >= n) return r;
                out[at] += factor * values[r][j];
            }
        if (j < k) return r;
    }
    return world;
}
