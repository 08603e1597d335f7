/* SPDX-License-Identifier: Apache-2.0 */
/* Lets `import sparsifiers._kernel` succeed, for tools that import whatever they find; it holds nothing. The
   functions are called through ctypes, so a machine without Python's headers builds them all the same. */

#if defined(__has_include)
#if __has_include(<Python.h>)
#include <Python.h>

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Loops in C for sparsifiers.kernel.", 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
#endif
#endif
