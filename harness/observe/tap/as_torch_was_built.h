// Include this first wherever ATen/record_function.h is included, directly or not.
//
// at::RecordFunction has members that exist only without NDEBUG, and RecordFunction::inputs() checks one of them.
// PyTorch's own libraries are built with NDEBUG, so code that looks at their objects must be as well.
#pragma once

#ifndef NDEBUG
#define NDEBUG
#endif
