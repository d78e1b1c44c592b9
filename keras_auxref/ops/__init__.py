"""The mathematics of the auxiliary reflection as pure functions of tensors, on the last axis of inputs of any rank ≥ 1.

Everything here runs on TensorFlow, JAX (compiled or not) and PyTorch; `preimages` is NumPy. What the backends do differently
is in `ops.backend`. PyTorch refuses second derivatives of `log_det_jacobian`, `reflect_and_log_det` and `inverse`.
"""

from keras_auxref.ops.cayley import cayley
from keras_auxref.ops.factored import factored_inverse, factored_reflect, factored_reflect_and_log_det
from keras_auxref.ops.factored_flow import factored_flow, factored_flow_and_log_det, factored_flow_inverse
from keras_auxref.ops.factors import Factors, factorize, is_certified
from keras_auxref.ops.householder import householder
from keras_auxref.ops.householder_flow import householder_flow
from keras_auxref.ops.householder_product import householder_product
from keras_auxref.ops.inverse import Inverse, inverse, inverse_with_info
from keras_auxref.ops.jacobian import jacobian
from keras_auxref.ops.log_det import Reflected, log_det_jacobian, reflect_and_log_det
from keras_auxref.ops.matrix_exp import matrix_exp
from keras_auxref.ops.newton import newton_inverse
from keras_auxref.ops.preimages import preimages
from keras_auxref.ops.reflect import reflect
from keras_auxref.ops.sylvester import orthonormal_columns, sylvester, sylvester_and_log_det, sylvester_inverse

__all__ = [
    "Factors",
    "Inverse",
    "Reflected",
    "cayley",
    "factored_flow",
    "factored_flow_and_log_det",
    "factored_flow_inverse",
    "factored_inverse",
    "factored_reflect",
    "factored_reflect_and_log_det",
    "factorize",
    "householder",
    "householder_flow",
    "householder_product",
    "inverse",
    "inverse_with_info",
    "is_certified",
    "jacobian",
    "log_det_jacobian",
    "matrix_exp",
    "newton_inverse",
    "orthonormal_columns",
    "preimages",
    "reflect",
    "reflect_and_log_det",
    "sylvester",
    "sylvester_and_log_det",
    "sylvester_inverse",
]
