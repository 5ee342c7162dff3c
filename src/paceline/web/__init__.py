"""The explorer: a local page that answers as its sliders move. Needs `pip install 'paceline[web]'`.

scenario.py   what is on the page: a model, a cluster, a plan, edits; as one value that a link restores
controls.py   the sliders and choices of a scenario, and what moving one does
panels.py     the parts of the page, each made by the functions behind the commands
workers.py    processes that compute panels, with a time limit
search.py     the search for the best plan: a process with progress, which can be stopped
guard.py      who may ask: this machine, this run's token, this page
server.py     the routes; `static/` has the page
"""
