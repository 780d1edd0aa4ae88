// Pages of the guide come first in the search; decisions and the log are not in it. The numbers are Sphinx's own.
var Scorer = {
  score: ([docname, , , , score]) =>
    /^(guide|index)/.test(docname) ? score + 20 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
