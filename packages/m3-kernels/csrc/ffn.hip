// Entry of the FFN launch: one source for AMD, NVIDIA and the CPU. What each target does with an entry is in m3/platform/<target>_entry.h.
#include "m3/ffn/launch.h"
#include "m3/formats/bf16.h"
#include "m3/formats/mxfp4.h"
#include "m3/formats/mxfp8.h"
#include "m3/formats/nvfp4.h"
#include "m3/platform/entry.h"

#ifdef M3_ROWS
using Shape = m3::StaticShape<M3_ROWS, M3_HIDDEN, M3_INTERMEDIATE, M3_EXPERTS, M3_TOP_K, M3_WORLD>;
#else
using Shape = m3::DynamicShape;
#endif

M3_KERNEL(m3_ffn_bf16, m3::formats::Bf16, Shape)
M3_KERNEL(m3_ffn_mxfp4, m3::formats::Mxfp4, Shape)
M3_KERNEL(m3_ffn_mxfp8, m3::formats::Mxfp8, Shape)
M3_KERNEL(m3_ffn_nvfp4, m3::formats::Nvfp4, Shape)
#ifdef M3_PLAIN_SCALES
M3_KERNEL(m3_ffn_mxfp4_any_scale, m3::formats::Mxfp4AnyScale, Shape)
M3_KERNEL(m3_ffn_mxfp8_any_scale, m3::formats::Mxfp8AnyScale, Shape)
#endif
