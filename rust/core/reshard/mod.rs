//! From one partition to another: what must move, in which order, and at what price (rule 2.6).
//!
//! | module | answers |
//! |---|---|
//! | [`intersect`] | which source shards lie under each destination shard, dim by dim |
//! | [`plan`] | the transfers: who sends which box to whom |
//! | `balance` | which of the replicas of a shard sends |
//! | [`coverage`] | whether boxes made by hand tile a tensor |
//! | [`rounds`] | the transfers in rounds, each within a budget of memory |
//! | [`collectives`] | the same change of layout as a short sequence of collectives, the cheapest found |

mod balance;
pub mod collectives;
pub mod coverage;
pub mod intersect;
pub mod plan;
pub mod rounds;
