// The token maps of cones.
#ifndef GNOMON_SRC_BASE_CONE_MAP_H_
#define GNOMON_SRC_BASE_CONE_MAP_H_

namespace gnomon {

// Maps a token (w, z) with last column z to X = m(z) w and to scalars that are functions of z
// (base/cone_heights-inl.h).
struct ConeMap {
  enum class Function { kUmbral, kPenumbral };

  Function function = Function::kUmbral;
  bool as_is = false;   // the map "none": z is the height
  double r = 1;         // umbral cones: the radius; penumbral cones: the maximum height
  double farthest = 0;  // umbral cones: heights are exp(z), with z clamped to [-farthest, farthest]

  static constexpr int kMostScalars = 2;
  int scalars() const { return function == Function::kPenumbral ? 2 : 1; }
};

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_CONE_MAP_H_
