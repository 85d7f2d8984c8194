//! Positions as numbers: mixed radix, and what is linear in a coordinate.
//!
//! | module | answers |
//! |---|---|
//! | [`radix`] | checked products, strides, digits, division by a divisor that is used many times |
//! | `linear` | sums of weighted coordinates, for many positions in a row |

pub(crate) mod linear;
pub mod radix;
