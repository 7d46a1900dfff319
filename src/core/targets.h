#ifndef GNOMON_SRC_CORE_TARGETS_H_
#define GNOMON_SRC_CORE_TARGETS_H_

namespace gnomon {

// On the first call, selects the instruction set named by GNOMON_TARGET or, if it is not set, the
// best one. Later calls do nothing.
void ChooseTargetOnce();

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_TARGETS_H_
