// Defects for ci/sanitize.sh to find: an extension of its own, never a part of the product.
#include <Python.h>

#include <climits>
#include <thread>
#include <vector>

namespace {

// Volatile, so that the compiler neither sees the defects nor leaves them out.
volatile int one = 1;
int shared = 0;

PyObject* heap_overflow(PyObject*, PyObject*) {
  std::vector<int> numbers(4);
  volatile int* past_the_end = numbers.data() + 4;
  *past_the_end = one;
  Py_RETURN_NONE;
}

PyObject* signed_overflow(PyObject*, PyObject*) {
  int most = INT_MAX;
  return PyLong_FromLong(most + one);
}

PyObject* data_race(PyObject*, PyObject*) {
  std::thread first([] { shared += one; });
  std::thread second([] { shared += one; });
  first.join();
  second.join();
  return PyLong_FromLong(shared);
}

PyMethodDef functions[] = {
    {"heap_overflow", heap_overflow, METH_NOARGS, nullptr},
    {"signed_overflow", signed_overflow, METH_NOARGS, nullptr},
    {"data_race", data_race, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sidestream_planted", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

} // namespace

#define SIDESTREAM_JOIN_(a, b) a##b
#define SIDESTREAM_JOIN(a, b) SIDESTREAM_JOIN_(a, b)
PyMODINIT_FUNC SIDESTREAM_JOIN(PyInit_, TORCH_EXTENSION_NAME)() {
  return PyModule_Create(&definition);
}
