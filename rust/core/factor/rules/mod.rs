//! The rules of the ops that are known, by their names in StableHLO.

mod contract;
mod given;
mod index;
mod linalg;
mod shape;

use self::given::{Given, all_alike};
use super::{
    attributes::{Attributes, Of},
    rule::{Kind, Rule},
};
use crate::error::Result;

/// The ops that compute each element of a result from the elements at its place.
const ELEMENTWISE: [&str; 62] = [
    "abs",
    "acos",
    "acosh",
    "add",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "clamp",
    "compare",
    "complex",
    "convert",
    "cosh",
    "cosine",
    "count_leading_zeros",
    "digamma",
    "divide",
    "erf",
    "erf_inv",
    "erfc",
    "exponential",
    "exponential_minus_one",
    "floor",
    "identity",
    "imag",
    "integer_power",
    "is_finite",
    "lgamma",
    "log",
    "log_plus_one",
    "logistic",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "or",
    "popcnt",
    "power",
    "real",
    "reduce_precision",
    "remainder",
    "round_nearest_afz",
    "round_nearest_even",
    "rsqrt",
    "select",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sine",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "xor",
];

/// The others.
const OTHERS: [&str; 26] = [
    "batch_norm_inference",
    "bitcast_convert",
    "broadcast_in_dim",
    "cholesky",
    "concatenate",
    "convolution",
    "dot_general",
    "dynamic_slice",
    "dynamic_update_slice",
    "eigh",
    "fft",
    "gather",
    "pad",
    "qr",
    "reduce",
    "reduce_window",
    "reshape",
    "reverse",
    "rng_bit_generator",
    "scatter",
    "select_and_scatter",
    "slice",
    "sort",
    "top_k",
    "transpose",
    "triangular_solve",
];

/// Says whether an op computes each element of a result from those at its place.
#[must_use]
pub fn is_elementwise(op: &str) -> bool {
    ELEMENTWISE.contains(&op)
}

/// The names of all ops that have a rule.
pub fn names() -> impl Iterator<Item = &'static str> {
    ELEMENTWISE.into_iter().chain(OTHERS)
}

/// The rule of an op for operands and results of these shapes.
///
/// # Errors
/// [`crate::error::Error::Op`] if there is no op of the name, an attribute is missing, or the shapes are not those of such
/// an op.
///
/// ```
/// use shardwise_core::factor::{Attribute, Attributes, rule};
/// let dims = |name: &str, dims: &[i64]| (name.to_owned(), Attribute::Integers(dims.to_vec()));
/// let contracted = [dims("lhs_contracting_dimensions", &[1]), dims("rhs_contracting_dimensions", &[0])];
/// let product = rule("dot_general", &[&[4, 8], &[8, 16]], &[&[4, 16]], &Attributes(contracted.to_vec()))?;
/// assert_eq!(product.to_string(), "([i,k],[k,j])->([i,j])");
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn rule(op: &str, operands: &[&[i64]], results: &[&[i64]], attributes: &Attributes) -> Result<Rule> {
    let given = Given { of: Of::new(op, attributes), operands, results };
    match op {
        "batch_norm_inference" => linalg::batch_norm_inference(given),
        "bitcast_convert" => shape::bitcast_convert(given),
        "broadcast_in_dim" => shape::broadcast_in_dim(given),
        "cholesky" => linalg::cholesky(given),
        "concatenate" => shape::concatenate(given),
        "convolution" => contract::convolution(given),
        "dot_general" => contract::dot_general(given),
        "dynamic_slice" => index::dynamic_slice(given),
        "dynamic_update_slice" => index::dynamic_update_slice(given),
        "eigh" => linalg::eigh(given),
        "fft" => linalg::fft(given),
        "gather" => index::gather(given),
        "pad" => shape::pad(given),
        "qr" => linalg::qr(given),
        "reduce" => contract::reduce(given),
        "reduce_window" => contract::reduce_window(given),
        "reshape" => shape::reshape(given),
        "reverse" => shape::reverse(given),
        "rng_bit_generator" => linalg::rng_bit_generator(given),
        "scatter" => index::scatter(given),
        "select_and_scatter" => contract::select_and_scatter(given),
        "slice" => shape::slice(given),
        "sort" => index::sort(given),
        "top_k" => index::top_k(given),
        "transpose" => shape::transpose(given),
        "triangular_solve" => linalg::triangular_solve(given),
        _ if is_elementwise(op) => elementwise(given),
        _ => {
            let known: Vec<&str> = names().collect();
            let meant = crate::shown::meant(op, &known);
            Err(given.of.refused(format!("no rule is known for it{meant}; give one as a `FactorRule`")))
        }
    }
}

fn elementwise(given: Given<'_>) -> Result<Rule> {
    given.at_least_one(1)?;
    let shape = given.results[0];
    for (number, operand) in given.operands.iter().enumerate() {
        let scalar = operand.is_empty() && matches!((given.of.op, number), ("select", 0) | ("clamp", 0 | 2));
        if !scalar {
            given.operand(number, shape)?;
        }
    }
    Ok(all_alike(given, |_| Kind::Pass))
}
