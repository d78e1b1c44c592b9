"""The mathematics of the auxiliary reflection as pure functions of tensors, on the last axis of inputs of any rank ≥ 1.

`householder`, `householder_product`, `cayley`, `matrix_exp`, `reflect`, `jacobian`, `newton_inverse` and the three functions of
the factored reflection run on every Keras backend. `factorize`, `log_det_jacobian`, `inverse` and `inverse_with_info` need
TensorFlow. `preimages` is NumPy.
"""

from keras_auxref.ops.cayley import cayley
from keras_auxref.ops.factored import factored_inverse, factored_reflect, factored_reflect_and_log_det
from keras_auxref.ops.factors import Factors, factorize
from keras_auxref.ops.householder import householder
from keras_auxref.ops.householder_product import householder_product
from keras_auxref.ops.inverse import inverse, inverse_with_info
from keras_auxref.ops.jacobian import jacobian
from keras_auxref.ops.log_det import log_det_jacobian
from keras_auxref.ops.matrix_exp import matrix_exp
from keras_auxref.ops.newton import newton_inverse
from keras_auxref.ops.preimages import preimages
from keras_auxref.ops.reflect import reflect
from keras_auxref.ops.search import Inverse

__all__ = [
    "Factors",
    "Inverse",
    "cayley",
    "factored_inverse",
    "factored_reflect",
    "factored_reflect_and_log_det",
    "factorize",
    "householder",
    "householder_product",
    "inverse",
    "inverse_with_info",
    "jacobian",
    "log_det_jacobian",
    "matrix_exp",
    "newton_inverse",
    "preimages",
    "reflect",
]
