//! From one partition to another: what must move, in which order, at what price, and moving it (rule 2.6).
//!
//! | module | answers |
//! |---|---|
//! | [`intersect`] | which source shards lie under each destination shard, dim by dim |
//! | [`plan`] | the transfers: who sends which box to whom |
//! | `balance` | which of the replicas of a shard sends |
//! | [`coverage`] | whether boxes made by hand tile a tensor |
//! | [`rounds`] | the transfers in rounds, each within a budget of memory |
//! | [`collectives`] | the same change of layout as a short sequence of collectives, the cheapest found |
//! | [`memory`] | whether two strided regions of memory share a byte |
//! | `form` | how a box lies in two arrays: in rows, and blocks of rows |
//! | [`copy`] | strided copies of raw bytes: the one module with `unsafe` |
//! | [`run`] | a whole plan, copied on all cores |

mod balance;
pub mod collectives;
#[allow(unsafe_code)]
pub mod copy;
pub mod coverage;
mod form;
pub mod intersect;
pub mod memory;
pub mod plan;
pub mod rounds;
pub mod run;
