//! A change of layout at a price (rule 2.6).
//!
//! | module | answers |
//! |---|---|
//! | [`collectives`] | a change of layout as a short sequence of collectives, the cheapest found |

pub mod collectives;
