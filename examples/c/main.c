/* Computes causal attention with an ALiBi bias from C, forward and backward. Compares one value of
 * each result with a plain loop. */
#include <gnomon/gnomon.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { kLength = 100, kDim = 16, kOffsets = 2 * kLength - 1 };

static float q[kLength][kDim], k[kLength][kDim], v[kLength][kDim];
static float o[kLength][kDim], d_o[kLength][kDim], d_v[kLength][kDim];
static float lse[kLength], statistics[3][kLength], bias[kOffsets];
static const float factor = 0.25f; /* 1 / sqrt(kDim) */

/* The weight of key j for query i, computed from the formula. */
static double weight(int i, int j) {
  double sum = 0, found = 0;
  for (int n = 0; n <= i; ++n) {
    double score = bias[n - i + kLength - 1];
    for (int d = 0; d < kDim; ++d) score += factor * q[i][d] * k[n][d];
    sum += exp(score);
    if (n == j) found = exp(score);
  }
  return found / sum;
}

static int agree(const char* name, double actual, double expected) {
  printf("%s: %.6f, expected %.6f\n", name, actual, expected);
  return fabs(actual - expected) <= 1e-5 * (1 + fabs(expected));
}

int main(void) {
  for (int i = 0; i < kLength; ++i) {
    for (int d = 0; d < kDim; ++d) {
      const double n = i * kDim + d + 1;
      q[i][d] = (float)sin(0.7 * n);
      k[i][d] = (float)sin(1.1 * n);
      v[i][d] = (float)sin(1.7 * n);
      d_o[i][d] = 1;
    }
  }
  for (int n = 0; n < kOffsets; ++n) bias[n] = -0.1f * (float)fabs(n - (kLength - 1.0));

  const gnomon_attention input = {.function = "dot",
                                  .batch = 1,
                                  .heads = 1,
                                  .key_heads = 1,
                                  .queries = kLength,
                                  .keys = kLength,
                                  .dim = kDim,
                                  .value_dim = kDim,
                                  .x = q[0],
                                  .y = k[0],
                                  .v = v[0],
                                  .factor = &factor,
                                  .bias = bias,
                                  .causal = 1,
                                  .threads = 2,
                                  .statistics = statistics[0]};
  const gnomon_attention_gradient gradient = {.v = d_v[0]};
  if (gnomon_attention_forward(&input, o[0], lse) != GNOMON_OK ||
      gnomon_attention_backward(&input, o[0], lse, d_o[0], &gradient) != GNOMON_OK) {
    fprintf(stderr, "%s\n", gnomon_last_error());
    return 1;
  }

  double expected_o = 0, expected_d_v = 0;
  for (int j = 0; j < kLength; ++j) expected_o += weight(50, j) * v[j][3];
  for (int i = 0; i < kLength; ++i) expected_d_v += weight(i, 50);
  int same = agree("o", o[50][3], expected_o);
  same = agree("d_v", d_v[50][3], expected_d_v) && same;

  gnomon_attention wrong = input;
  wrong.function = "dott";
  same = gnomon_attention_forward(&wrong, o[0], lse) == GNOMON_INVALID_ARGUMENT && same;
  printf("%s\n", gnomon_last_error());
  return same && strstr(gnomon_last_error(), "dott") != NULL ? 0 : 1;
}
