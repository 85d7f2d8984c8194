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
use crate::{error::Result, shown};

/// The ops that compute each element of a result from the elements at its place.
#[rustfmt::skip]
const ELEMENTWISE: [&str; 71] = [
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
    "ceil", "clamp", "compare", "complex", "convert", "cosh", "cosine", "count_leading_zeros", "digamma", "divide",
    "erf", "erf_inv", "erfc", "exponential", "exponential_minus_one", "floor", "identity", "igamma", "igamma_grad_a",
    "igammac", "imag", "integer_power", "is_finite", "lgamma", "log", "log_plus_one", "logistic", "maximum", "minimum",
    "multiply", "negate", "next_after", "not", "or", "polygamma", "popcnt", "power", "real", "reduce_precision",
    "regularized_incomplete_beta", "remainder", "round_nearest_afz", "round_nearest_even", "rsqrt", "select",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sinh", "sqrt", "square", "subtract",
    "tan", "tanh", "xor", "zeta",
];

/// Elementwise ops of two operands.
#[rustfmt::skip]
const OF_TWO: [&str; 23] = [
    "add", "and", "atan2", "compare", "complex", "divide", "igamma", "igamma_grad_a", "igammac", "maximum", "minimum",
    "multiply", "next_after", "or", "polygamma", "power", "remainder", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "subtract", "xor", "zeta",
];

/// The rule of an op.
type Known = fn(Given<'_>) -> Result<Rule>;

/// The others, with their rules.
const OTHERS: [(&str, Known); 28] = [
    ("batch_norm_inference", linalg::batch_norm_inference),
    ("bitcast_convert", shape::bitcast_convert),
    ("broadcast_in_dim", shape::broadcast_in_dim),
    ("cholesky", |given| linalg::decomposed(given, &["mn"])),
    ("concatenate", shape::concatenate),
    ("convolution", contract::convolution),
    ("dot_general", contract::dot_general),
    ("dynamic_slice", index::dynamic_slice),
    ("dynamic_update_slice", index::dynamic_update_slice),
    ("eigh", linalg::eigh),
    ("fft", linalg::fft),
    ("gather", index::gather),
    ("lu", |given| linalg::decomposed(given, &["mn k m"])),
    ("pad", shape::pad),
    ("qr", |given| linalg::decomposed(given, &["mn k", "mk kn", "mm mn"])),
    ("reduce", contract::reduce),
    ("reduce_window", contract::reduce_window),
    ("reshape", shape::reshape),
    ("reverse", shape::reverse),
    ("rng_bit_generator", linalg::rng_bit_generator),
    ("scatter", index::scatter),
    ("select_and_scatter", contract::select_and_scatter),
    ("slice", shape::slice),
    ("sort", index::sort),
    ("svd", |given| linalg::decomposed(given, &["k", "k mk kn", "k mm nn"])),
    ("top_k", index::top_k),
    ("transpose", shape::transpose),
    ("triangular_solve", linalg::triangular_solve),
];

/// Says whether an op computes each element of a result from those at its place.
#[must_use]
pub fn is_elementwise(op: &str) -> bool {
    ELEMENTWISE.binary_search(&op).is_ok()
}

/// Says whether an op has a rule.
#[must_use]
pub fn is_known(op: &str) -> bool {
    is_elementwise(op) || OTHERS.binary_search_by_key(&op, |(name, _)| name).is_ok()
}

/// The names of all ops that have a rule.
fn names() -> impl Iterator<Item = &'static str> {
    ELEMENTWISE.into_iter().chain(OTHERS.iter().map(|(name, _)| *name))
}

/// The rule of an op for operands and results of these shapes.
///
/// # Errors
/// [`crate::error::Error::Op`] if there is no op of the name, an attribute is missing, or the shapes are not those of such
/// an op.
///
/// ```
/// use shardwise_core::factor::{Attribute, Attributes, rule};
/// let [left, right] = [1, 0].map(|dim| Attribute::Integers(vec![dim]));
/// let contracted = Attributes(vec![("lhs_contracting_dimensions", left), ("rhs_contracting_dimensions", right)]);
/// let product = rule("dot_general", &[&[4, 8], &[8, 16]], &[&[4, 16]], &contracted)?;
/// assert_eq!(product.to_string(), "([i,k],[k,j])->([i,j])");
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn rule(op: &str, operands: &[&[i64]], results: &[&[i64]], attributes: &Attributes<'_>) -> Result<Rule> {
    let given = Given { of: Of::new(op, attributes), operands, results };
    if let Ok(at) = OTHERS.binary_search_by_key(&op, |(name, _)| name) {
        return OTHERS[at].1(given);
    }
    if is_elementwise(op) {
        return elementwise(given);
    }
    let meant = shown::meant(op, &names().collect::<Vec<_>>());
    Err(given.of.refused(format!("no rule is known for it{meant}; give one as a `FactorRule`")))
}

fn elementwise(given: Given<'_>) -> Result<Rule> {
    let operands = match given.of.op {
        // Edges take several, of which they give one.
        "identity" => given.operands.len(),
        "clamp" | "regularized_incomplete_beta" | "select" => 3,
        op => 1 + usize::from(OF_TWO.binary_search(&op).is_ok()),
    };
    given.counted(operands, 1)?;
    let shape = given.results[0];
    for (number, operand) in given.operands.iter().enumerate() {
        let scalar = operand.is_empty() && matches!((given.of.op, number), ("select", 0) | ("clamp", 0 | 2));
        if !scalar {
            given.operand(number, shape)?;
        }
    }
    Ok(all_alike(given, |_| Kind::Pass))
}
