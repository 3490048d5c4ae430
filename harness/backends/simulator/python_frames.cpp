#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "caller.h"
#include "python_frames.h"

#include <atomic>
#include <cstring>
#include <utility>

namespace sidestream {
namespace {

// All of these are read and written with the GIL held, except for the thread's own mark.
auto& ignored = *new std::vector<std::string>();
PyThreadState* body_state = nullptr;
std::atomic<uint64_t> body_turn{0};
thread_local uint64_t this_turn = 0;

bool python_is_usable() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

bool is_callers_own(const char* file) {
  for (const auto& prefix : ignored) {
    if (std::strncmp(file, prefix.c_str(), prefix.size()) == 0) {
      return false;
    }
  }
  return std::strncmp(file, "<frozen ", 8) != 0; // the import system's own frames
}

SourceLine innermost_line(PyThreadState* state) {
  SourceLine result;
  PyFrameObject* frame = PyThreadState_GetFrame(state);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (!file) {
      PyErr_Clear();
    } else if (is_callers_own(file)) {
      result = {intern(file), PyFrame_GetLineNumber(frame)};
    }
    Py_DECREF(code);
    PyFrameObject* outer = result.file ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return result;
}

// Holds the GIL, and keeps an exception that is being raised out of the way of what is called under it.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~WithGil() {
    PyErr_Restore(type_, value_, traceback_);
    PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
};

} // namespace

WithoutGil::WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (state_) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

void set_ignored_prefixes(std::vector<std::string> prefixes) {
  ignored = std::move(prefixes);
}

SourceLine line_of_this_thread() {
  if (!python_is_usable()) {
    return {};
  }
  WithGil gil;
  return innermost_line(PyThreadState_Get());
}

SourceLine line_of_body_thread() {
  if (!python_is_usable()) {
    return {};
  }
  WithGil gil;
  return body_state ? innermost_line(body_state) : SourceLine{};
}

void remember_body_thread() {
  body_state = PyThreadState_Get();
  this_turn = ++body_turn;
}

void forget_body_thread() {
  body_state = nullptr;
}

bool is_body_thread() {
  return this_turn == body_turn;
}

} // namespace sidestream
